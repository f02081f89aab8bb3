"""Every operator that the tiny models leave after normalisation has a row, and its options can be listed."""

from __future__ import annotations

import inspect
import operator
import warnings

import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from autopar.capture.lengths import symbolic_lengths
from autopar.frontend import load, max_positions
from autopar.problem.reading import read
from autopar.rules import options_for, unknown
from passes import ANNOTATE, NORMALIZE, facts, run
from tests.helpers.export import export_graph
from tests.helpers.tiny import TINY

ONLY_BATCH = ("hf-bert", "recommender", "mlp")  # they have no sequence, or a fixed one
FAST = ("gpt", "moe", "cnn", "recommender", "hf-t5", "hf-mixtral", "hf-resnet")  # every kind of operator; dist/test_verify.py plans and emits all models


def graph(name: str, train: bool):
    """The normalised graph of a tiny model, batch and sequence symbolic."""
    loaded = load(TINY[name], batch=6, seq=10, train=train)
    batch, sequence = Dim("b"), Dim("s", max=max_positions(loaded.model) or 64)

    def dims(x):
        if not isinstance(x, torch.Tensor):
            return None
        return {0: batch, 1: sequence} if x.ndim > 1 and not x.is_floating_point() and name not in ONLY_BATCH else {0: batch}

    args, kwargs = pytree.tree_map(dims, (loaded.args, loaded.kwargs))
    names = dict(zip(inspect.signature(loaded.model.forward).parameters, args, strict=False))
    with warnings.catch_warnings(), symbolic_lengths(loaded.model):
        warnings.simplefilter("ignore")
        return run(export_graph(loaded.model, loaded.args, dict(loaded.kwargs), names | dict(kwargs)), NORMALIZE)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in TINY if name not in FAST)])
def test_every_call_has_a_row_and_most_can_be_split(name):
    gm = graph(name, train=True)
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem and facts.tensors(n)]
    assert calls and unknown(n.target for n in calls) == []
    program = read(run(gm, ANNOTATE), dict.fromkeys(gm.meta["symbols"], 8), training=True)
    split = [any(o.split for o in options_for(op.call, 2)) for op in program.ops.values() if op.role == "op"]
    assert sum(split) > len(split) / 2
