"""Biases go into linear layers at the end, and only what is one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from passes import NORMALIZE, ops
from passes.biases import biases
from tests.helpers.export import B, S
from tests.helpers.small_graphs import data, normalized
from tests.unit.passes.test_small import MATMULS

aten = torch.ops.aten


@pytest.mark.parametrize("name", MATMULS)
def test_matmuls_lose_bias_before_they_are_looked_at(name):
    gm = normalized(
        MATMULS[name],
        data(4, 5, 6),
        dims={"x": {0: B, 1: S}} if name != "baddbmm" else None,
        passes=NORMALIZE[: NORMALIZE.index(biases)],
    )
    assert not [node for node in gm.graph.nodes if node.target is aten.linear.default and len(node.args) > 2]


BIASES = {
    "linear": (lambda m, x, y: F.linear(x, m.w, m.w[0]), True),
    "added": (lambda m, x, y: m.w[0] + F.linear(x, m.w), True),
    "made behind": (lambda m, x, y: F.linear(x, m.w) + m.w[0].exp(), True),
    "flattened": (lambda m, x, y: F.linear(x.reshape(-1, 6), m.w, m.w[0]).view(x.shape), True),
    "a matmul": (lambda m, x, y: x @ m.w + m.w[0], True),
    "addmm": (lambda m, x, y: torch.addmm(m.w[0], x.view(-1, 6), m.w).view(x.shape), True),
    "one row": (lambda m, x, y: m.w[0] @ m.w + m.w[0], False),
    "a matrix each": (lambda m, x, y: x @ x.mT + m.w[0, :5], False),
    "no vector": (lambda m, x, y: F.linear(x, m.w) + m.w[:5], False),
    "a number": (lambda m, x, y: F.linear(x, m.w) + m.w[0, 0], False),
    "broadcast": (lambda m, x, y: F.linear(x, m.w[:1]) + m.w[0], False),
    "scaled": (lambda m, x, y: torch.add(F.linear(x, m.w), m.w[0], alpha=2), False),
    "read twice": (lambda m, x, y: (lambda h: h + m.w[0] + h.exp())(F.linear(x, m.w)), False),
    "another dtype": (lambda m, x, y: F.linear(x, m.w) + m.w[0].float(), False),
    "the result's dtype": (lambda m, x, y: F.linear(x.float(), m.w.float()) + m.w[0], False),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_go_into_linear_layers(name):
    function, joined = BIASES[name]
    gm = normalized(function, data(4, 5, 6))
    layers = [node for node in gm.graph.nodes if node.target in (aten.linear.default, aten.matmul.default, ops.affine)]
    assert [len(node.args) for node in layers] == [3 if joined else 2]
    assert (aten.add.Tensor in [node.target for node in gm.graph.nodes]) is not joined
