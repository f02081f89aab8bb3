"""Einsums are taken apart as torch takes them apart: values, gradients and FLOPs stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from passes import ANNOTATE, NORMALIZE, edit, facts, run
from passes.annotate_flops import FLOPS
from passes.einsums import einsums
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets

aten = torch.ops.aten
SIZES = {"b": 4, "t": 5, "d": 6, "e": 7, "r": 2, "h": 3}


class Einsum(nn.Module):
    """An einsum of `x`, with something trained added, and weights."""

    def __init__(self, equation: str, sizes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.equation = equation
        self.weights = nn.ParameterList(torch.randn(size, dtype=torch.float64) for size in sizes)

    def forward(self, x):
        return torch.einsum(self.equation, x + self.weights[0], *self.weights[1:])


def made(equation: str, *sizes: tuple[int, ...]) -> Einsum:
    """Sizes are those of the letters where none are given."""
    left = equation.split("->")[0].replace(" ", "").split(",")
    return Einsum(equation, sizes or [tuple(SIZES[letter] for letter in word) for word in left])


def normalized(model: Einsum):
    x = torch.randn(model.weights[0].shape, dtype=torch.float64)
    gm = run(export_graph(model, (x,)), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, {"x": x})
    return gm


CASES = {
    "btd,dr,re->bte": ["btd,dr->btr", "btr,re->bte"],
    "btd, dr, re, eh": ["btd,dr->btr", "btr,re->bte", "bte,eh->bht"],
    "bt,td,bd->b": ["bt,td->bd", "bd,bd->b"],
    "bd,dr,bd->br": ["bd,dr->brd", "brd,bd->br"],  # d is summed where its last two meet
    "btd,de->be": ["bd,de->be"],
    "btd,er->be": ["b,e->be"],
    "bt,de->": [",->"],
    "bdd,de->be": ["bdd,de->be"],
    "bttd,de->be": ["bttd->bd", "bd,de->be"],
    "bd,de->be": ["bd,de->be"],
    "btd->bt": ["btd->bt"],
}


@pytest.mark.parametrize("equation", CASES)
def test_products_of_pairs(equation):
    assert [node.args[0] for node in edit.calls(normalized(made(equation)), aten.einsum.default)] == CASES[equation]


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("...td,dr,...re->...te", [(4, 3, 5, 6), (6, 2), (3, 2, 7)]),  # one has fewer of the dims that are not named
        ("...t,...t,t->t", [(4, 3, 5), (3, 5), (5,)]),  # which are summed here
        ("...t,td->td", [(4, 3, 5), (5, 6)]),
        ("btd,bde,bed->bte", [(4, 1, 6), (1, 6, 7), (4, 7, 1)]),
        ("bd,bd->b", [(4, 1), (4, 6)]),
        ("b...,d...->...bd", [(4, 1, 3), (5, 2, 1)]),
    ],
)
def test_broadcast_dims(equation, sizes):
    normalized(made(equation, *sizes))


def test_a_path_is_followed():
    model = made("bd,de,eh->bh")
    gm = export_graph(model, (model.weights[0].detach(),))
    (node,) = edit.calls(gm, aten.einsum.default)
    node.kwargs = {"path": [1, 2, 0, 1]}
    assert [node.args[0] for node in edit.calls(einsums(gm), aten.einsum.default)] == ["de,eh->hd", "bd,hd->bh"]
    assert_same(gm, model, {"x": model.weights[0].detach()})


class Positions(nn.Module):
    """Of any batch and number of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in ((6, 2), (7,)))

    def forward(self, x):
        return torch.einsum("b...d,dr,e,b...d->b...r", x, self.u, self.v, x)


def test_sizes_stay_symbols():
    model, x = Positions(), torch.randn(4, 5, 6, dtype=torch.float64)
    gm = run(export_graph(model, (), {"x": x}, {"x": {0: B, 1: S}}), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, {"x": x[:3, :2]})
    assert targets(gm).count("aten.einsum.default") == 3


@pytest.mark.parametrize("equation", ["btd,dr,re->bte", "bt,td,de->be", "btd,de->be", "bt,btd,bde->be", "btd,bte->de"])
def test_flops_are_those_of_torch(equation):
    model = made(equation)
    x = torch.randn(model.weights[0].shape, dtype=torch.float64)
    gm = run(export_graph(model, (x,)), (*NORMALIZE, *ANNOTATE))
    products = [node for node in edit.calls(gm) if node.target in FLOPS]
    with FlopCounterMode(display=False) as forward:
        result = model(x)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert sum(facts.flops(node) for node in products) == forward.get_total_flops()
    assert sum(facts.backward_flops(node) for node in products) == backward.get_total_flops()
