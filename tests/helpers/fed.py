"""Models with a weight that repeated blocks are given from outside, as DeBERTa's positions."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from tests.helpers.verify import Subject


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, h: Tensor, shared: Tensor) -> Tensor:
        return h + torch.tanh(self.up(h)) @ shared


class Fed(nn.Module):
    """A stem, blocks that are given one weight, and a head. `how` says what else there is of words: "stem" and "head"
    have weights of their own, "read" is a stem and "last" a head that read the shared weight too, and "normed" blocks
    are given what a norm makes of it."""

    def __init__(self, how: str, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.shared = how.split(), nn.Parameter(torch.randn(8, 8) / 4)
        self.stem, self.head, self.norm = (
            nn.Linear(8, 8) if name in self.how else None for name in ("stem", "head", "normed")
        )
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.stem is None else self.stem(x)
        h = h @ self.shared if "read" in self.how else h
        shared = (
            self.shared if self.norm is None else F.layer_norm(self.shared, (8,), self.norm.weight[0], self.norm.bias)
        )
        for layer in self.layers:
            h = layer(h, shared)
        h = h @ self.shared if "last" in self.how else h
        return (h if self.head is None else self.head(h)).square().mean()


class Alone(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}


@cache
def fed(how: str = "", count: int = 3) -> Subject:
    """A Fed, captured."""
    model = Fed(how, count)
    return Alone(f"fed {how}", "train", capture(model, (torch.zeros(8, 8),)), model.state_dict())
