"""The simulated step begins its collectives in the order in which the emitted step does."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.buckets import BUCKET_BYTES
from autopar.layout import LOCAL
from autopar.runtime.count import count
from autopar.simulate.stages import Stages
from tests.helpers.ranks import on_ranks

WIDTH = 1800
Begun = list[tuple[str, int, float]]
"""(kind, mesh axis, bytes) of collectives one after the other; those in a row of one kind on one axis are one, since
the members of a bucket are counted one by one."""


class _Block(nn.Module):
    """Large enough that what follows the scatters of its first gradients begins in its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.c(self.b(self.a(h).relu()).relu())


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, WIDTH), nn.ModuleList(_Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h).square().mean()


@cache
def _model() -> _Model:
    torch.manual_seed(0)
    return _Model().double()


def _ran(folder: Path) -> Begun:
    """The collectives of the second step of one rank: from then on gathers are prefetched."""
    module = autopar.load(folder)
    batch = module.shard_batch(torch.randn(12, 16, dtype=torch.float64))
    module.train_step(*batch)
    module.zero_grad()
    with count() as seen:
        module.train_step(*batch)
    return _in_rows([(each.kind, each.axis, each.bytes) for each in seen if each.kind not in LOCAL])


def _in_rows(begun: Begun) -> Begun:
    return [(*row, sum(nbytes for *_, nbytes in each)) for row, each in groupby(begun, lambda each: each[:2])]


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("hsdp", (2, 2)),
        ("tp_zero3", (2, 2)),
        *(pytest.param(recipe, (4,), marks=pytest.mark.slow) for recipe in ("ddp", "zero1", "zero2", "zero3")),
    ],
)
def test_simulated_and_emitted_order_are_equal(recipe: str, mesh: tuple[int, ...], tmp_path: Path) -> None:
    assert 8 * WIDTH**2 >= BUCKET_BYTES
    made = autopar.compile(
        _model(), "cpu:1x4", (torch.randn(12, 16, dtype=torch.float64),), recipe=recipe, mesh=mesh, time_limit_s=5.0
    )
    made.save(tmp_path)
    ran = Stages.of(made.captured.gm, made.plan).whole()
    pieces = [mark.piece for mark in ran.marks if mark.piece.axis >= 0]
    simulated = _in_rows([(piece.kind, piece.axis, piece.nbytes) for piece in pieces])
    for found in on_ranks(4, _ran, tmp_path):
        assert found == simulated
