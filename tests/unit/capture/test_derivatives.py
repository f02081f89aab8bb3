"""Derivatives that forward takes by torch.func: of each sample they are operators as any, of a whole batch torch.export
takes what they are of for a constant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.inside import DERIVED, why_untraced
from autopar.errors import CaptureError


class Net(nn.Module):
    """A mean of squares of a derivative, which subclasses take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, 4] -> []."""
        return self.change(self.linear(x)).square().mean()


class TakesDerivatives(Net):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda at: self.linear(at).tanh().sum())(x)


class TakesThemOfProducts(Net):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda at: (at @ self.linear.weight).square().sum())(x)


class MapsDerivatives(Net):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda at: self.linear(at).tanh().sum()))(x)


def test_derivatives_of_a_whole_batch_are_refused_and_those_of_samples_are_not() -> None:
    for kind in (TakesDerivatives, TakesThemOfProducts):
        with pytest.raises(
            CaptureError,
            match=r"derivatives of a whole batch are taken in forward by torch.func \(grad, vjp\).* "
            r"torch.func.vmap\(torch.func.grad\(f\)\)",
        ):
            capture(kind(), (torch.randn(8, 4),))
    assert capture(MapsDerivatives(), (torch.randn(8, 4),)).hints == {"b": 8}


@pytest.mark.parametrize(
    "said",
    ["cannot make a constant of a functorch tensor", "Expected FakeTensor, got <class 'torch.Tensor'>"],
    ids=["2.13", "2.11"],
)
def test_what_versions_of_torch_say_of_derivatives_is_told_as_such(said: str) -> None:
    assert why_untraced(AssertionError(said), [], {}) == DERIVED
    assert why_untraced(AssertionError("Expected FakeTensor, got <class 'int'>"), [], {}) == ""
