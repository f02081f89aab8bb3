"""Files of models and clusters with faults, for the command line."""

from __future__ import annotations

MODELS = '''"""Models that go wrong."""
import torch
from torch import nn


@torch.library.custom_op("autopar_test_cli::shuffle", mutates_args=())
def shuffle(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean()


@shuffle.register_fake
def _(x):
    return torch.empty_like(x)


shuffle.register_autograd(lambda ctx, grad: grad - grad.mean())


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids, y):
        h = self.linear(self.table(ids))
        if self.kind == "branch":
            if h.sum() > 0:
                h = h * 2
        if self.kind == "unknown op":
            h = shuffle(h)
        return ((h - y) ** 2).mean()


def good(batch=8, seq=128):
    return Net("plain"), (torch.zeros(batch, dtype=torch.long), torch.zeros(batch, 8))


def big():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2048, 2048), Mean()), (torch.zeros(8, 2048),)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def branch():
    return Net("branch"), good()[1]


def fixed():
    return good()


def unknown_op():
    return Net("unknown op"), good()[1]


def out_of_range():
    return Net("plain"), (torch.full((8,), 99), torch.zeros(8, 8))
'''


CLUSTER = """name = "ours"
[device]
kind = "cpu"
"""
