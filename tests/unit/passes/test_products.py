"""Products that torch has under other names: values, gradients and FLOPs are those of matmuls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.rules import unknown
from passes import ANNOTATE, NORMALIZE, edit, facts, run
from passes.annotate_flops import FLOPS
from passes.products import PRODUCTS, least
from tests.helpers.export import B, assert_same, check_values, export_graph

Make = Callable[..., Tensor]
ROWS = (4, 3, 6)


class Product(nn.Module):
    """A product of `x`, with something trained added, and weights of these sizes."""

    def __init__(self, multiply: Make, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.multiply = multiply
        self.weights = nn.ParameterList(torch.randn(size, dtype=torch.float64) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x + self.weights[0], *self.weights[1:])


CASES: dict[str, tuple[Make, tuple[tuple[int, ...], ...]]] = {
    "tensordot": (lambda x, w: torch.tensordot(x, w, 2), (ROWS, (3, 6, 5))),
    "tensordot of dims": (lambda x, w: torch.tensordot(x, w, ([-1, 0], [1, -1])), (ROWS, (5, 6, 4))),
    "tensordot of none": (lambda x, w: torch.tensordot(x, w, 0), ((4, 3), (5,))),
    "tensordot of a broadcast dim": (lambda x, w: torch.tensordot(x, w, 2), ((4, 1, 6), (3, 6, 5))),
    "inner": (torch.inner, (ROWS, (5, 6))),
    "inner of vectors": (torch.inner, ((6,), (6,))),
    "inner of numbers": (torch.inner, (ROWS, ())),
    "addbmm": (lambda x, w, b: torch.addbmm(b, x, w, beta=2, alpha=0.5), (ROWS, (4, 6, 5), (5,))),
    "two": (lambda x, w: torch.linalg.multi_dot([x, w]), ((4, 6), (6, 5))),
    "three from the left": (lambda x, *w: torch.linalg.multi_dot([x, *w]), ((4, 6), (6, 2), (2, 7))),
    "three from the right": (lambda x, *w: torch.linalg.multi_dot([x, *w]), ((9, 8), (8, 7), (7, 2))),
    "four": (lambda x, *w: torch.linalg.multi_dot([x, *w]), ((9, 2), (2, 7), (7, 3), (3, 8))),
    "from a row to a column": (lambda x, *w: torch.linalg.multi_dot([x, *w]), ((9,), (9, 8), (8, 2), (2,))),
    "chain": (lambda x, *w: torch.chain_matmul(x, *w), ((9, 8), (8, 7), (7, 2))),
    "linalg.matmul": (torch.linalg.matmul, (ROWS, (6, 5))),
}


def annotated(model: nn.Module, x: Tensor):
    gm = run(export_graph(model, (x,)), (*NORMALIZE, *ANNOTATE))
    check_values(gm)
    assert_same(gm, model, {"x": x})
    assert not unknown(node.target for node in edit.calls(gm)) and not any(
        node.target in PRODUCTS for node in edit.calls(gm)
    )
    return gm


def flops(gm, fact):
    return sum(fact(node) for node in edit.calls(gm) if node.target in FLOPS)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul")
@pytest.mark.parametrize("name", CASES)
def test_products_are_matmuls(name):
    multiply, sizes = CASES[name]
    model, x = Product(multiply, *sizes), torch.randn(sizes[0], dtype=torch.float64)
    gm = annotated(model, x)
    with FlopCounterMode(display=False) as forward:
        result = model(x)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    if forward.get_total_flops():  # torch counts none of vectors, nor of what it multiplies element by element
        assert (flops(gm, facts.flops), flops(gm, facts.backward_flops)) == (
            forward.get_total_flops(),
            backward.get_total_flops(),
        )


class Bilinear(nn.Module):
    def __init__(self, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.layer, self.up = (
            nn.Bilinear(rows, columns, 5, bias, dtype=torch.float64),
            nn.Linear(rows, columns, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.up(x))


@pytest.mark.parametrize(
    ("rows", "columns", "bias", "wide", "narrow"), [(6, 3, True, 1, 2), (3, 6, False, 2, 1), (4, 4, True, 1, 2)]
)
def test_bilinear_layers_are_einsums(rows, columns, bias, wide, narrow):
    """The rows that come in, which have no gradient, are multiplied first where they are longer; then the rows of the
    linear layer are."""
    gm = annotated(Bilinear(rows, columns, bias), torch.randn(2, 7, rows, dtype=torch.float64))
    assert flops(gm, facts.flops) == 2 * 14 * (rows * columns + 5 * rows * columns + 5 * min(rows, columns))
    assert flops(gm, facts.backward_flops) == 2 * 14 * (
        rows * columns + wide * 5 * rows * columns + narrow * 5 * min(rows, columns)
    )


def test_transposed_convolutions_of_volumes_have_flops():
    model, x = nn.ConvTranspose3d(4, 6, 3, stride=2), torch.randn(2, 4, 5, 5, 5)
    gm = run(export_graph(model, (x,)), (*NORMALIZE, *ANNOTATE))
    with FlopCounterMode(display=False) as forward:
        result = model(x)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert (flops(gm, facts.flops), flops(gm, facts.backward_flops)) == (
        forward.get_total_flops(),
        backward.get_total_flops(),
    )


def test_the_order_of_a_chain_is_that_of_least_work():
    bounds = (30, 35, 15, 5, 10, 20, 25)  # Cormen et al., Introduction to Algorithms, section 15.2
    assert least(bounds, 0, 6) == (15125, 3)


def test_bilinear_of_any_batch():
    model, x = Bilinear(6, 3, True), torch.randn(4, 2, 6, dtype=torch.float64)
    gm = run(export_graph(model, (), {"x": x}, {"x": {0: B}}), NORMALIZE)
    assert_same(gm, model, {"x": x[:3]})
