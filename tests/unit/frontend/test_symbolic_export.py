"""Every tiny model exports from the meta device with symbolic batch and sequence: what capture relies on."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from autopar.capture.lengths import symbolic_lengths
from autopar.frontend import load, max_positions
from tests.helpers.tiny import TINY

BATCH, SEQ = 6, 12
FAST = [("gpt", True), ("cnn", True), ("hf-llama", True)]  # `capture` exports the others in many a test
SLOW = [case for name in TINY for train in (True, False) if (case := (name, train)) not in FAST]


@pytest.mark.parametrize(("name", "train"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_exports_with_symbolic_sizes(name, train):
    loaded = load(TINY[name], batch=BATCH, seq=SEQ, train=train)
    assert loaded.model.training is train
    inputs = [x for x in (*loaded.args, *loaded.kwargs.values()) if isinstance(x, torch.Tensor)]
    assert {t.device.type for t in (*inputs, *loaded.model.parameters())} == {"meta"}
    batch, seq = Dim("b"), Dim("s", max=max_positions(loaded.model) or 64)
    dims = [{0: batch, 1: seq} if t.shape[1:] == (SEQ,) else {0: batch} for t in inputs]
    queue = iter(dims)
    shapes = {name: next(queue) if isinstance(x, torch.Tensor) else None for name, x in loaded.kwargs.items()} or tuple(
        dims
    )
    with symbolic_lengths(loaded.model):
        program = export(loaded.model, loaded.args, loaded.kwargs, strict=False, dynamic_shapes=shapes)
    nodes = [
        node for node in program.graph.find_nodes(op="placeholder") if node.name in program.graph_signature.user_inputs
    ]
    free = {
        str(size) for node in nodes for size in getattr(node.meta["val"], "shape", ()) if isinstance(size, torch.SymInt)
    }
    assert len(free) == len({dim for d in dims for dim in d.values()})
