"""What is to be trained has a loss that weights have gradients of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError


class Frozen(nn.Module):
    """A squared error of a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, y):
        return ((self.linear(x) - y) ** 2).mean()


class Detached(Frozen):
    """One whose loss is detached, and whose layer is not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)

    def forward(self, x, y):
        return super().forward(x, y).detach() + 0 * y.mean()


class Weightless(nn.Module):
    def forward(self, x, y):
        return (x * y).mean()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            Detached(),
            r"it is computed of none of those that want one \(linear.weight, linear.bias\), or through detach\(\)",
        ),
        (Frozen(), r"none wants one \(requires_grad\); thaw what is to be trained before"),
        (Weightless(), "it has none"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_that_trains_nothing_is_refused(model: nn.Module, why: str) -> None:
    x = torch.zeros(8, 4)
    with pytest.raises(
        CaptureError, match=f"no weight of {type(model).__name__} has a gradient of its loss: {why}.*mode='inference'"
    ):
        autopar.compile(model, "cpu:1x2", (x, x))
    assert autopar.compile(model, "cpu:1x2", (x, x), mode="inference", recipe="single").plan.ranks == 2
