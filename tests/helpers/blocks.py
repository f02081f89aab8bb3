"""Small models made of repeated blocks whose outer code does what real ones do, and what makes them no chains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    """A residual layer that knows its place; `kind` changes what it computes."""

    def __init__(self, index: int, kind: str = "relu", width: int = WIDTH) -> None:
        super().__init__()
        self.index, self.kind = index, kind
        self.linear = nn.Linear(width, width)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(h)
        x = x.relu() if self.kind == "relu" else x.tanh()
        return h + (x if mask is None else x * mask)


class ReadsIndex(Block):
    """What it computes depends on its place."""

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        h = super().forward(h, mask)
        return h * 2 if self.index == 4 else h


class Stack(nn.Module):
    """Embedding, blocks, head. Subclasses change `walk`."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.head(self.walk(self.first(x)))
        return {"loss": ((out - y) ** 2).mean(), "out": out}

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


class MasksByPlace(Stack):
    """Every second block gets another mask: outer code indexes by position."""

    def walk(self, h: Tensor) -> Tensor:
        masks = [h.sigmoid(), h.cos()]
        for i, layer in enumerate(self.layers):
            h = layer(h, masks[i % 2])
        return h


class MaskOfOne(Stack):
    """One block in the middle gets another mask."""

    def walk(self, h: Tensor) -> Tensor:
        masks = [h.sigmoid(), h.cos()]
        for i, layer in enumerate(self.layers):
            h = layer(h, masks[1 if i == 3 else 0])
        return h


class Mean(Stack):
    """Divides by the number of blocks: a constant of the outer code."""

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(h) / len(self.layers)


class MeanAtRest(Mean):
    """Divides by the number of blocks where the first one is not in training."""

    def walk(self, h: Tensor) -> Tensor:
        return Stack.walk(self, h) if self.layers[0].training else super().walk(h)


class LooksInside(Stack):
    """Reads a number off a module of a block."""

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(h / self.layers[0].linear.in_features)


class CallsPart(Stack):
    """Calls a module of a block once more, behind the blocks."""

    def walk(self, h: Tensor) -> Tensor:
        return self.layers[0].linear(super().walk(h))


class Collects(Stack):
    """Uses what every block gives."""

    def walk(self, h: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            h = layer(h)
            seen.append(h)
        return torch.stack(seen).sum(0)


class Heads(Stack):
    """Collects what small lists give, before its layers and behind them."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.heads = nn.ModuleList(Block(i) for i in range(4))
        self.sides = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)) for _ in range(2))

    def walk(self, h: Tensor) -> Tensor:
        h = super().walk(h + sum(side(h) for sides in self.sides for side in sides))
        return torch.stack([head(h) for head in self.heads]).prod(0)


class Middle(Stack):
    """Uses what one block in the middle gives."""

    def walk(self, h: Tensor) -> Tensor:
        seen = [h]
        for layer in self.layers:
            seen.append(layer(seen[-1]))
        return seen[-1] + seen[len(seen) // 2]


class Scales(Stack):
    """Changes the stream in place between two blocks."""

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 3:
                h.mul_(0.5)
        return h


class ByNumber(Stack):
    """Outer code asks for blocks by number."""

    def walk(self, h: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            h = self.layers[i](h)
        return h


class Twice(Stack):
    """Goes over its blocks twice."""

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(super().walk(h))


class Counted(Stack):
    """Weighs what its six blocks give of one input."""

    def walk(self, h: Tensor) -> Tensor:
        return torch.einsum("e,ebd->bd", h.new_ones(6), torch.stack([layer(h) for layer in self.layers]))


def blocks(kinds: str, of: type[Block] = Block) -> list[nn.Module]:
    """One block per letter: r computes relu, t tanh."""
    return [of(i, {"r": "relu", "t": "tanh"}[letter]) for i, letter in enumerate(kinds)]


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs for a Stack."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 3, generator=generator)
