"""Layers of experts written as loops over modules, in the spellings that models use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, HIDDEN, WIDTH, TOP = 5, 8, 12, 2


class Gated(nn.Module):
    """Three matrices, as in Mixtral."""

    def __init__(self, hidden: int = HIDDEN, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(hidden, width, bias=False),
            nn.Linear(hidden, width, bias=False),
            nn.Linear(width, hidden, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plain() -> nn.Module:
    """Two layers with biases."""
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))


def mixtral(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As Hugging Face wrote it, and many after them."""
    out = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    mask = F.one_hot(chosen, num_classes=len(experts)).permute(2, 1, 0)
    for number, expert in enumerate(experts):
        rank, token = torch.where(mask[number])
        rows = expert(hidden[None, token].reshape(-1, hidden.shape[-1])) * gates[token, rank, None]
        out.index_add_(0, token, rows.to(hidden.dtype))
    return out


def litgpt(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Masks of all experts at once."""
    masks = (chosen.unsqueeze(-1) == torch.arange(len(experts), device=chosen.device)).permute(2, 0, 1)
    out = torch.zeros_like(hidden)
    for mask, expert in zip(masks, experts, strict=True):
        token, rank = torch.where(mask)
        out[token] += gates[token, rank, None] * expert(hidden[token])
    return out


def mistral(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """A comparison for each expert."""
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        token, rank = torch.where(chosen == number)
        out[token] += gates[token, rank, None] * expert(hidden[token])
    return out


def nonzero(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Places of a mask, added to what was there."""
    out = hidden * 2
    for number, expert in enumerate(experts):
        token, rank = (chosen == number).nonzero(as_tuple=True)
        out = out.index_add(0, token, expert(hidden[token]) * gates[token, rank].unsqueeze(-1))
    return out


def columns(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Places as a matrix, masks turned, rows put with accumulation."""
    out = hidden.new_zeros(hidden.shape)
    for number, expert in enumerate(experts):
        places = (chosen == number).transpose(0, 1).nonzero()
        token, rank = places[:, 1], places[:, 0]
        out = out.index_put((token,), gates[token, rank].view(-1, 1) * expert(hidden[token]), accumulate=True)
    return out


def switch(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """One expert for each token (https://arxiv.org/abs/2101.03961)."""
    out, first, best = torch.zeros_like(hidden), gates[:, 0], chosen[:, 0]
    for number, expert in enumerate(experts):
        (token,) = torch.where(best == number)
        out[token] += first[token, None] * expert(hidden[token])
    return out


def one_column(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Places of a vector as they come, a matrix of one column."""
    out, first, best = torch.zeros_like(hidden), gates[:, 0], chosen[:, 0]
    for number, expert in enumerate(experts):
        token = (best == number).nonzero()
        out[token] += first[token].unsqueeze(-1) * expert(hidden[token])
    return out


def masked(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Masks of tokens as indices, and the sum of their gates."""
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        here = chosen == number
        mask, gate = here.any(dim=-1), (gates * here).sum(-1)
        out[mask] += expert(hidden[mask]) * gate[mask].unsqueeze(-1)
    return out


def columns_of_all(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Gates of all experts, zero where they were not chosen; rows by index_select."""
    every = hidden.new_zeros(hidden.shape[0], len(experts)).scatter(1, chosen, gates)
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        token = torch.nonzero((chosen == number).any(-1)).squeeze(-1)
        out = out.index_add(0, token, expert(hidden.index_select(0, token)) * every[token, number].unsqueeze(1))
    return out


def by_rank(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """First choices first, then second ones."""
    out = torch.zeros_like(hidden)
    for rank in range(TOP):
        for number, expert in enumerate(experts):
            mask = chosen[:, rank] == number
            out[mask] += gates[mask, rank].unsqueeze(-1) * expert(hidden[mask])
    return out


def best(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """One expert for each token, whose rows are written and not added."""
    out, gate, first = torch.zeros_like(hidden), gates[:, 0], chosen[:, 0]
    for number, expert in enumerate(experts):
        mask = first == number
        out[mask] = expert(hidden[mask]) * gate[mask].unsqueeze(-1)
    return out


LOOPS: dict[str, Callable[[Tensor, Tensor, Tensor, nn.ModuleList], Tensor]] = {
    loop.__name__: loop
    for loop in (mixtral, litgpt, mistral, nonzero, columns, switch, one_column, masked, columns_of_all, by_rank, best)
}


def any_(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Whether a mask is true anywhere, asked before its places are."""
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        mask = chosen == number
        if not mask.any():
            continue
        token, rank = mask.nonzero(as_tuple=True)
        out[token] += gates[token, rank].unsqueeze(-1) * expert(hidden[token])
    return out


def none(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """How many places there are."""
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        token, rank = torch.where(chosen == number)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(hidden[token]) * gates[token, rank, None])
    return out


def length(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """The same, and a mask of tokens counted."""
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        mask = (chosen == number).any(-1)
        (token,) = torch.where(mask)
        if len(token) > 0 and mask.sum() > 0:
            out[token] = out[token] + expert(hidden[token]) * (gates * (chosen == number)).sum(-1, keepdim=True)[token]
    return out


def counted(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As DeepSeek wrote it."""
    out = torch.zeros_like(hidden)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    for number in range(len(experts)):
        if counts[number] == 0:
            continue
        token, rank = torch.where(chosen == number)
        out[token] += experts[number](hidden[token]) * gates[token, rank, None]
    return out


def hit(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As Hugging Face wrote it later: only the experts that were chosen."""
    out = torch.zeros_like(hidden)
    mask = F.one_hot(chosen, num_classes=len(experts)).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        rank, token = torch.where(mask[number].squeeze(0))
        rows = experts[number](hidden[None, token].reshape(-1, hidden.shape[-1])) * gates[token, rank, None]
        out.index_add_(0, token, rows)
    return out


def unique(hidden: Tensor, gates: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """The numbers that there are."""
    out = torch.zeros_like(hidden)
    for number in chosen.unique().tolist():
        token, rank = torch.where(chosen == number)
        out[token] += gates[token, rank, None] * experts[number](hidden[token])
    return out


ASKING: dict[str, Callable[[Tensor, Tensor, Tensor, nn.ModuleList], Tensor]] = {
    loop.__name__: loop for loop in (any_, none, length, counted, hit, unique)
}
"""Loops that leave out experts whom no token chose."""


class Looped(nn.Module):
    """A router and a loop over experts: [b, s, hidden] -> [b, s, hidden]."""

    def __init__(
        self,
        loop: Callable[[Tensor, Tensor, Tensor, nn.ModuleList], Tensor],
        expert: Callable[[], nn.Module] = Gated,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.loop, self.gate = loop, nn.Linear(hidden, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, flattened, through their experts."""
        hidden = x.view(-1, x.shape[-1])
        gates, chosen = torch.topk(self.gate(hidden).softmax(-1), TOP, dim=-1)
        return self.loop(hidden, gates / gates.sum(-1, keepdim=True), chosen, self.experts).view(x.shape)
