"""Functions of single samples in a model: operators on batches in its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.verify import graph_rows
from tests.helpers.own_functions import Rounded


class Mapping(nn.Module):
    """A map, and what a subclass does with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.mapped(self.linear(x)).square().mean()


class Once(Mapping):
    def mapped(self, h: Tensor) -> Tensor:
        """With a weight from outside."""
        return torch.func.vmap(lambda one: (one @ self.w).tanh())(h)


class Twice(Mapping):
    def mapped(self, h: Tensor) -> Tensor:
        """Every row with every other."""
        rows = h.flatten(0, 1)
        pair = torch.vmap(lambda a, b: (a * b).sum(), (None, 0))
        return torch.vmap(pair, (0, None))(rows, rows @ self.w)


class Masks(Mapping):
    def mapped(self, h: Tensor) -> Tensor:
        """As Hugging Face makes masks of its own rules."""
        groups, places = (h[..., 0] > 0).long(), torch.arange(h.shape[1])
        mask = torch.vmap(torch.vmap(lambda group, i, j: (i >= j) | (group[0] == 1), (None, None, 0)), (None, 0, None))
        return (h @ h.mT) * mask(groups[0], places, places)


class Results(Mapping):
    def mapped(self, h: Tensor) -> Tensor:
        """Several results, one along another dim; an argument by name."""
        found = torch.vmap(lambda one, by: {"sum": one.sum(0) * by, "row": one[0]}, out_dims={"sum": 1, "row": 0})(
            h, by=self.w[0]
        )
        return found["sum"].T + found["row"]


class Scaled(Mapping):
    def mapped(self, h: Tensor) -> Tensor:
        """By what no gradient is asked of."""

        def one(row: Tensor) -> Tensor:
            pairs = torch.view_as_complex(row.unflatten(-1, (-1, 2)))
            with torch.no_grad():
                scale, turn = (row @ self.w).abs().sum(), pairs.exp()
            return row / scale + row.detach() * row + turn.abs().sum() * row

        return torch.vmap(one)(h)


@pytest.mark.parametrize("kind", [Scaled, Once, Twice, Masks, Results])
def test_what_is_mapped_over_samples(kind: type[Mapping]) -> None:
    torch.manual_seed(0)
    model = kind()
    captured = capture(model, (torch.randn(4, 6, 8),))
    assert captured.hints == {"b": 4} and not captured.notes
    for batch in (4, 7):
        rows, notes = graph_rows(model, captured, (torch.randn(batch, 6, 8),), {}, training=True)
        assert not notes and max(row.error for row in rows) < 1e-5, rows


@pytest.mark.parametrize(
    "derivative",
    [
        torch.func.grad,
        torch.func.hessian,
        torch.func.jacrev,
        torch.func.jacfwd,
        lambda function: torch.func.jacrev(torch.func.jacrev(function)),
    ],
)
def test_derivatives_of_single_samples(
    derivative: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
) -> None:
    """As of what solves a differential equation; second ones write the diagonals of unit matrices."""

    class Solves(Mapping):
        def mapped(self, h: Tensor) -> Tensor:
            return torch.vmap(derivative(lambda one: self.linear(one.tanh()).tanh().square().sum()))(h)

    torch.manual_seed(0)
    model, x = Solves(), torch.randn(4, 8)
    captured = capture(model, (x,))
    rows, _ = graph_rows(model, captured, (x,), {}, training=True)
    assert max(row.error for row in rows) < 1e-5, rows


def test_a_function_with_a_backward_of_its_own_is_not_mapped() -> None:
    class Rounds(Mapping):
        def mapped(self, h: Tensor) -> Tensor:
            return torch.vmap(lambda one: Mapped.apply(one))(h)

    with pytest.raises(CaptureError, match=r"test_batched.py:\d+ maps .*Mapped, .*call it on whole batches"):
        capture(Rounds(), (torch.randn(4, 6, 8),))
    assert capture(Rounds(), (torch.randn(4, 6, 8),), mode="inference").gm


class Mapped(Rounded):
    """With torch's rule for mapping it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]  # the newer kind, which alone can be mapped
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing is kept."""
