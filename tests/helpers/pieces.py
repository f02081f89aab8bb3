"""Layers of experts whose rows are sorted and split into one piece for each."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

E, D, WIDTH, K = 4, 6, 5, 2


def by_bincount(chosen, scores):
    return torch.bincount(chosen.flatten(), minlength=E).tolist()


def by_histogram(chosen, scores):
    return torch.histc(chosen.view(-1).float(), bins=E, min=0, max=E - 1).int().tolist()


def by_marks(chosen, scores):
    return torch.zeros(scores.shape, dtype=scores.dtype).scatter(1, chosen, 1).long().sum(0).tolist()


class Split(nn.Module):
    """Rows sorted by expert and split, a module for each piece, and each row added to its token; `twist` says what is
    different."""

    def __init__(self, **twist):
        super().__init__()
        self.sizes, self.twist = twist.pop("sizes", by_bincount), twist
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, WIDTH), nn.GELU(), nn.Linear(WIDTH, D)) for _ in range(E)
        )
        if "other" in twist:
            self.experts[2][1] = nn.Tanh()

    def forward(self, x):
        hidden = x.view(-1, D)
        gates, chosen = self.gate(hidden).softmax(-1).topk(K)
        sizes, order = self.sizes(chosen, self.gate(hidden)), chosen.flatten().argsort(stable=True)
        rows = self.twist.get("rows", lambda rows: rows)(hidden[order // K]).split(sizes)
        made = [expert(piece) for expert, piece in zip(self.experts, rows, strict=True)]
        out = torch.cat(self.twist.get("joined", lambda made: made)(made))
        out = (out if out.dim() == 2 else out.sum(1)) * gates.flatten()[order, None]
        return (torch.zeros_like(hidden).index_add(0, order // K, out) ** 2).mean()


class Products(Split):
    """Parts of parameters, each layer joined by itself or all at once."""

    def __init__(self, at_once, **twist):
        super().__init__(**twist)
        del self.experts
        self.at_once = at_once
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(E, *size)) for size in ((WIDTH, D), (WIDTH, D), (D, WIDTH))
        )

    def forward(self, x):
        hidden = x.view(-1, D)
        gates, chosen = self.gate(hidden).softmax(-1).topk(K)
        sizes, order = self.sizes(chosen, self.gate(hidden)), chosen.flatten().argsort(stable=True)
        rows = hidden[order // K]
        if self.at_once:
            made = [
                F.silu(piece @ self.first[i].t()) * (piece @ self.second[i].t()) @ self.third[i].t()
                for i, piece in enumerate(rows.split(sizes))
            ]
            rows = torch.cat(made)
        else:
            both = torch.cat((self.first, self.second), 1)
            inner = torch.cat([F.linear(piece, both[i]) for i, piece in enumerate(rows.split(sizes, dim=0))], dim=0)
            inner = F.silu(inner[:, :WIDTH]) * inner[:, WIDTH:]
            rows = torch.cat(
                [F.linear(piece, self.third[i]) for i, piece in enumerate(inner.split(sizes, dim=0))], dim=0
            )
        return (torch.zeros_like(hidden).index_add(0, order // K, rows * gates.flatten()[order, None]) ** 2).mean()


PIECES = {
    "modules": Split,
    "histogram": lambda: Split(sizes=by_histogram),
    "marks": lambda: Split(sizes=by_marks),
    "at once": lambda: Products(True),
    "one by one": lambda: Products(False, sizes=by_marks),
}
