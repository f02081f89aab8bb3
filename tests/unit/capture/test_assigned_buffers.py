"""Buffers that are assigned, and what evaluation changes."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.unit.capture.test_buffers import WIDTH, Blocks, Centred, same


class AssignsOnce(Centred):
    """What is in its buffer when it is made is of no step."""

    ready = False

    def change(self, y):
        if not self.ready:
            self.ready, self.centre = True, torch.arange(float(WIDTH), device=y.device).to(y.dtype)
        return y - self.centre


def test_what_the_first_step_assigns_for_all_is_captured() -> None:
    same(Blocks(AssignsOnce, 4))


class AssignsOfAnotherDtype(Centred):
    def change(self, y):
        self.centre = self.centre.double() + y.detach().mean(0)
        return y


class AssignsLonger(Centred):
    def change(self, y):
        self.centre = torch.cat([self.centre, y.detach().mean(0)])
        return y


@pytest.mark.parametrize(
    ("kind", "unlike"), [(AssignsOfAnotherDtype, r"float64\[4\]"), (AssignsLonger, r"float32\[8\]")]
)
def test_buffers_that_are_assigned_another_size_or_dtype_are_refused(kind: type[Centred], unlike: str) -> None:
    with pytest.raises(
        CaptureError,
        match=rf"assign the buffer blocks.0.centre a tensor that is {unlike} instead of float32\[4\].*"
        r"self.centre.copy_",
    ):
        capture(Blocks(kind, 1), (torch.randn(8, WIDTH),))
