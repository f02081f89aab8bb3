"""Weights too large to be packed into buckets (BUCKET_BYTES in float64): gathered into their leaves, and scattered from
where their gradients lie, with collectives of their own."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.buckets import BUCKET_BYTES

WIDTH = 1800


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(16, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.inner:
            h = h + layer(h).relu()
        return self.last(h).square().mean()


@cache
def _model() -> _Wide:
    torch.manual_seed(0)
    return _Wide()


@pytest.mark.parametrize(
    ("cluster", "recipe", "mesh"),
    [
        ("cpu:1x2", "ddp", None),
        ("cpu:1x2", "zero1", None),
        ("cpu:1x3", "zero2", None),
        ("cpu:1x4", "hsdp", (2, 2)),
        ("cpu:1x4", "tp_zero3", (2, 2)),
        ("cpu:1x4", "pp_zero1", None),
    ],
)
def test_equal_one_device(cluster: str, recipe: str, mesh: tuple[int, ...] | None) -> None:
    assert 8 * WIDTH**2 >= BUCKET_BYTES
    made = autopar.compile(_model(), cluster, (torch.randn(12, 16),), recipe=recipe, mesh=mesh, time_limit_s=5.0)
    report = made.verify(torch.randn(12, 16))
    assert report.ok, str(report)
