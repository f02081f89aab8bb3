"""A weight that repeated blocks are given from outside, as DeBERTa's positions: it is gathered, and its gradient summed, with those of all other readers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from tests.helpers.verify import Subject, by_chance, by_recipe


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, h: Tensor, shared: Tensor) -> Tensor:
        return h + torch.tanh(self.up(h)) @ shared


class Fed(nn.Module):
    """Blocks that are given one weight; `read`: so is what stands before them."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.shared = read, nn.Parameter(torch.randn(8, 8) / 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.shared if self.read else x
        for layer in self.layers:
            h = layer(h, self.shared)
        return h.square().mean()


class Alone(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}


def subject_of(read: bool) -> Subject:
    model = Fed(read)
    return Alone(f"fed {read}", "train", capture(model, (torch.zeros(8, 8),)), model.state_dict())


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("how", ["ddp", "zero1", "zero2", "zero3", "tp", *(f"random {seed}" for seed in range(4))])
def test_equals_one_device(how: str, read: bool) -> None:
    who, sizes = subject_of(read), (2, 2) if how.startswith("random") else (4,)
    made = by_chance(who, sizes, int(how.removeprefix("random"))) if how.startswith("random") else by_recipe(who, sizes, how)
    report = who.verified(made)
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])
