"""Every operator that the tiny models leave after normalisation has a row, and its options can be listed."""

from __future__ import annotations

import operator

import pytest

from autopar.problem.read_graph import read
from autopar.rules import options_for, unknown
from passes import edit, facts
from tests.helpers.tiny import TINY
from tests.helpers.verify import subject

# every kind of operator; dist/test_verify.py plans and emits all models
FAST = ("gpt", "moe", "cnn", "recommender", "hf-t5", "hf-mixtral", "hf-resnet")


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in TINY if name not in FAST)]
)
def test_every_call_has_a_row_and_most_can_be_split(name):
    gm = subject(name).captured.gm
    calls = [
        n
        for part in edit.graphs(gm)
        for n in part.graph.nodes
        if n.op == "call_function" and n.target is not operator.getitem and facts.tensors(n)
    ]
    assert calls and unknown(n.target for n in calls) == []
    program = read(gm, dict.fromkeys(gm.meta["symbols"], 8), training=True)
    split = [any(o.split for o in options_for(op.call, 2)) for op in program.ops.values() if op.role == "op"]
    assert sum(split) > len(split) / 2
