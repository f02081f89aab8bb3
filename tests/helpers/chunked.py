"""Models whose sizes have conditions: chunks of the sequence, the best few of it, a window."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, CHUNK, BEST = 40, 8, 8, 32


class Layer(nn.Module):
    """A map, then sums within chunks of the padded sequence, as linear attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        missing = (CHUNK - length % CHUNK) % CHUNK
        inner = F.pad(self.up(x), (0, 0, 0, missing))
        chunks = inner.reshape(x.shape[0], (length + missing) // CHUNK, CHUNK, 2 * WIDTH)
        sums = chunks.cumsum(2) + chunks.sum(2, keepdim=True)
        return x + self.down(sums.reshape(x.shape[0], length + missing, 2 * WIDTH)[:, :length])


class Model(nn.Module):
    """Tokens through such layers; `ends` adds how large the best of each sequence are."""

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.table, self.layers, self.head, self.ends = (
            nn.Embedding(VOCAB, WIDTH),
            nn.ModuleList(Layer() for _ in range(2)),
            nn.Linear(WIDTH, VOCAB),
            ends,
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + (x.sum(-1).topk(min(BEST, ids.shape[1]), -1).values.square().mean() if self.ends else 0.0)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {name: torch.randint(VOCAB, (batch, length), generator=generator) for name in ("ids", "labels")}
