"""Weights whose elements are moved before they are used: nothing of them is needed again for the backward, and nothing
is gathered again."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from tests.helpers.verify import Subject, by_chance, by_recipe


class Moved(nn.Module):
    """A matrix in many forms, in sums only."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Parameter(torch.randn(8, 8) / 4), nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        t = self.table
        forms = torch.stack((t.tril(), t.roll(1, 0), t.flip(1), t[:4].repeat(2, 1), t[:, ::2].repeat_interleave(2, 1)))
        return h + self.up(h) + forms.sum(0)


class Model(nn.Module):
    """A stem and three alike blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers = nn.Linear(8, 8), nn.ModuleList(Moved() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        return h.square().mean()


class Rows(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))}


@cache
def moved() -> Subject:
    model = Model()
    return Rows("moved", "train", capture(model, (torch.zeros(4, 8, 8),)), model.state_dict())


@pytest.mark.parametrize("how", ["zero1", "zero3", *(f"random {seed}" for seed in range(4))])
def test_equals_one_device(how: str) -> None:
    who = moved()
    report = who.verified(
        by_chance(who, (2, 2), int(how.removeprefix("random")))
        if how.startswith("random")
        else by_recipe(who, (4,), how)
    )
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])
