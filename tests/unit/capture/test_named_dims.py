"""Sizes that the user names: each name is for the input that it is given for, in every form that torch.export has for
it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.named_dims import assigned
from autopar.errors import CaptureError

B, S = {0: "b"}, {1: "s"}
X, Y = torch.zeros(6, 6), torch.zeros(6, 6)


class Net(nn.Module):
    """`x` has its samples in rows, `y` in columns."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y.t()).square().sum(1)


def both(x: Any, y: Any = None, **more: Any) -> None:
    """A forward."""


def several(first: Any, *rest: Any) -> None:
    """A forward of any number of inputs."""


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "given", "wanted"),
    [
        (both, (X, Y), {}, {"x": B, "y": S}, {0: B, 1: S}),
        (both, (X, Y), {}, {"y": S, "x": B}, {0: B, 1: S}),
        (both, (X, Y), {}, (B, S), {0: B, 1: S}),
        (both, (X, Y), {}, ((B, None), {}), {0: B}),
        (both, (X, Y), {}, {"x": {}, "y": S}, {1: S}),
        (both, (X,), {"y": Y}, ((B,), {"y": S}), {0: B, 1: S}),
        (both, (), {"y": Y, "x": X}, ((), {"x": B, "y": S}), {0: S, 1: B}),
        (both, (), {"y": Y, "x": X}, {"x": B, "y": S}, {0: S, 1: B}),
        (both, (X,), {"z": Y}, {"z": S, "x": B}, {0: B, 1: S}),
        (both, ({"ids": X, "mask": Y},), {}, {"x": {"mask": S, "ids": B}}, {0: B, 1: S}),
        (both, ([X, Y], 3), {}, {"x": [B, S], "y": None}, {0: B, 1: S}),
        (several, (X, Y, X), {}, {"first": B, "rest": (S, B)}, {0: B, 1: S, 2: B}),
    ],
)
def test_every_form_by_name_and_place(forward, args, kwargs, given, wanted) -> None:
    assert assigned(given, args, kwargs, inspect.signature(forward)) == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": B, "z": S}, "inputs are x, y, got x, z"),
        ({"x": B}, "inputs are x, y, got x"),
        ((B,), "2 inputs, got 1"),
        ({"x": B, "y": {0: 6}}, "dim 0 of input 1 is 6, which has no name"),
        ({"x": B, "y": {0: torch.export.Dim.AUTO}}, "which has no name"),
        ({"x": {0: torch.export.Dim("q", max=4)}, "y": None}, "dim 0 of input 0 has size 6, and q is from 0 to 4"),
        ({"x": {0: torch.export.Dim("q", min=7)}, "y": None}, "dim 0 of input 0 has size 6, and q is from 7 to"),
        ({"x": B, "y": 3}, "y has 3"),
        ("b", "it is neither a tuple nor a dict"),
    ],
)
def test_what_does_not_fit_the_inputs_is_said(given, said: str) -> None:
    with pytest.raises(CaptureError, match=r"dynamic_shapes is .* wanted \(args, kwargs\)") as error:
        capture(Net(), (X, Y), mode="inference", dynamic_shapes=given)
    assert said in str(error.value)


def test_names_in_another_order_are_those_of_their_inputs() -> None:
    captured = capture(Net(), (X, Y), mode="inference", dynamic_shapes={"y": {1: "b"}, "x": {0: "b"}})
    assert dict(captured.hints) == {"b": 6} and not captured.notes
