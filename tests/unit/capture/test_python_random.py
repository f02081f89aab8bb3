"""Random numbers of Python and numpy: models that draw them are refused with the line that does, and both generators
stay where they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError


class Net(nn.Module):
    """A squared error; subclasses do something to x first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        return ((self.linear(self.change(x)) - y) ** 2).mean()


class DropsByPython(Net):
    def change(self, x):
        x = x * 2.0
        if random.choice([True, False]):  # the line
            x = x + 1.0
        return x


class MasksByNumpy(Net):
    def mask(self, count):
        keep = np.random.rand(count) > 0.5  # the line
        return torch.as_tensor(keep)

    def change(self, x):
        kept = self.mask(x.shape[1])
        return x * kept


class ScalesByPython(Net):
    def twice(self, x):
        y = x + x
        return y

    def change(self, x):
        return self.twice(x) * random.random()  # the line


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", [DropsByPython, MasksByNumpy, ScalesByPython])
def test_draws_that_a_graph_would_repeat_are_refused_and_not_kept(kind, mode):
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(
        CaptureError,
        match=r"the same ones in every step\nat test_python_random.py:\d+: .*# the line; draw them with torch",
    ):
        capture(kind(), (torch.randn(8, 4), torch.randn(8, 4)), mode=mode)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
