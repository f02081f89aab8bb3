"""What a capture makes is gone with its result."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture import capture
from autopar.errors import CaptureError


class Halved(nn.Linear):
    """One that torch.export refuses where `asked`."""

    asked = False

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h / 2 if self.asked and h.sum() > 0 else h


def _environments() -> int:
    gc.collect()
    return sum(isinstance(one, ShapeEnv) for one in gc.get_objects())


def test_nothing_of_torch_export_stays() -> None:
    """Of the last one torch keeps a node: twice as many captures leave as much."""
    counts = []
    for _ in range(2):
        for asked in (False, True):
            model = Halved(4, 4)
            model.asked = asked
            try:
                capture(model, (torch.zeros(8, 4),), mode="inference")
            except CaptureError:
                assert asked
        counts.append(_environments())
    assert counts[0] == counts[1] <= 1, counts
