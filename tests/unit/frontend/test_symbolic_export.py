"""Every tiny model exports from the meta device with symbolic batch and sequence: what capture relies on."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from autopar.frontend import load, max_positions
from tests.helpers.tiny import TINY

BATCH, SEQ = 6, 12
FAST = [("gpt", True), ("cnn", True), ("hf-llama", True)]  # `capture` exports the others in many a test
SLOW = [case for name in TINY for train in (True, False) if (case := (name, train)) not in FAST]


@pytest.mark.parametrize(("name", "train"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_exports_with_symbolic_sizes(name, train):
    loaded = load(TINY[name], batch=BATCH, seq=SEQ, train=train)
    assert loaded.model.training is train
    inputs = [*loaded.args, *loaded.kwargs.values()]
    assert {t.device.type for t in (*inputs, *loaded.model.parameters())} == {"meta"}
    batch, seq = Dim("b"), Dim("s", max=max_positions(loaded.model) or 64)
    dims = [{0: batch, 1: seq} if t.shape[1:] == (SEQ,) else {0: batch} for t in inputs]
    shapes = dict(zip(loaded.kwargs, dims, strict=True)) if loaded.kwargs else tuple(dims)
    program = export(loaded.model, loaded.args, loaded.kwargs, strict=False, dynamic_shapes=shapes)
    nodes = [program.graph.find_nodes(op="placeholder")[-i - 1] for i in range(len(dims))]
    free = {str(size) for node in nodes for size in node.meta["val"].shape if isinstance(size, torch.SymInt)}
    assert len(free) == len({dim for d in dims for dim in d.values()})
