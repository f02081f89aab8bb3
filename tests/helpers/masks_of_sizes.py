"""Losses of what masks pick whose values follow from sizes, SimCLR's and products of all pairs of features, or are in
buffers: the halves that coupling layers map."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, FEATURES = 8, 4


class Pairs(nn.Module):
    """A loss of mapped rows [2 b, WIDTH], of two views of b samples."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.loss(self.linear(torch.cat([one, other])))


class KeepsMask(Pairs):
    """The mask is an attribute of the model, made for eight rows."""

    def __init__(self) -> None:
        super().__init__(_similarity)
        self.others = ~torch.eye(8, dtype=torch.bool)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return super().forward(one, other)[self.others].view(8, -1).logsumexp(1).mean()


class Coupling(nn.Module):
    """One half of the features is moved by the other one (RealNVP); a buffer says which."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        kept = int(mask.sum())
        self.scale, self.shift = (nn.Linear(kept, WIDTH - kept) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept, y = x[..., self.mask], torch.empty_like(x)
        y[..., self.mask] = kept
        y[..., ~self.mask] = x[..., ~self.mask] * self.scale(kept).tanh().exp() + self.shift(kept)
        return y


class Picking(nn.Module):
    """What a mask in a buffer picks is counted, and no weight has the size of it."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * x[:, self.mask].cumsum(1).view(len(x), -1)[:, -1:]


class Blocks(nn.Module):
    """Blocks with a mask each."""

    def __init__(self, block: Callable[[Tensor], nn.Module], masks: list[Tensor]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*map(block, masks))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (self.blocks(one) - other).square().mean()


def every(step: int) -> Tensor:
    """A mask of every so many features."""
    return torch.arange(WIDTH) % step == 0


def _similarity(rows: Tensor) -> Tensor:
    rows = F.normalize(rows, dim=1)
    return rows @ rows.T


def simclr(rows: Tensor) -> Tensor:
    similarity, n = _similarity(rows), len(rows)
    negatives = similarity[~torch.eye(n, dtype=torch.bool, device=rows.device)].view(n, -1)
    return negatives.logsumexp(1).mean() - similarity.diagonal(n // 2).mean()


def simclr_with_labels(rows: Tensor) -> Tensor:
    """As it is often written: masks of what masks have picked."""
    n = len(rows)
    labels = torch.cat([torch.arange(n // 2), torch.arange(n // 2)])
    labels, mask, similarity = (
        (labels[None] == labels[:, None]).float(),
        torch.eye(n, dtype=torch.bool),
        _similarity(rows),
    )
    labels, similarity = labels[~mask].view(n, -1), similarity[~mask].view(n, -1)
    logits = torch.cat([similarity[labels.bool()].view(n, -1), similarity[~labels.bool()].view(n, -1)], 1)
    return F.cross_entropy(logits / 0.1, torch.zeros(n, dtype=torch.long))


def changed_in_place(rows: Tensor) -> Tensor:
    n = len(rows)
    mask = torch.ones(n, n, dtype=torch.bool).fill_diagonal_(False)
    for i in range(n // 2):
        mask[i, n // 2 + i] = mask[n // 2 + i, i] = False
    return torch.masked_select(_similarity(rows), mask).reshape(n, -1).logsumexp(1).mean()


def upper_triangle(rows: Tensor) -> Tensor:
    """As many in no two rows."""
    similarity = _similarity(rows)
    return similarity[torch.ones_like(similarity).triu(1) > 0].var()


def of_features(rows: Tensor) -> Tensor:
    """All pairs of features of each sample, in front of other dims and behind them (DLRM): the mask is the same for any
    batch."""
    parts = rows.unflatten(1, (FEATURES, -1))
    pairs, mask = parts @ parts.mT, torch.triu(torch.ones(FEATURES, FEATURES), 1).bool()
    return (pairs[:, mask].cumsum(1) * pairs[..., mask]).square().mean() + pairs.permute(1, 2, 0)[mask.T.T].T.cumsum(
        1
    ).mean()


LOSSES = {loss.__name__: loss for loss in (simclr, simclr_with_labels, changed_in_place, upper_triangle, of_features)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Pairs, loss) for name, loss in LOSSES.items()},
    "kept by the model": KeepsMask,
    "halves": lambda: Blocks(Coupling, [every(2), ~every(2)] * 2),
    "more in one block": lambda: Blocks(Picking, [every(4), every(4), every(2), every(4), every(4)]),
}
SYMBOLIC = ("of_features", "halves", "more in one block")
"""Models whose masks are the same for any batch."""


def batch(samples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, WIDTH, generator=generator)
