"""Graphs of small functions, normalised by the passes."""

from __future__ import annotations

import torch
from torch import nn

from passes import NORMALIZE, run
from tests.helpers.export import assert_same, check_values, export_graph


class Fn(nn.Module):
    """A function with one weight matrix, so that gradients have somewhere to flow."""

    def __init__(self, function, rows: int = 6, columns: int = 6) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(rows, columns, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def forward(self, x, y=None):
        return self.function(self, x, y)


def normalized(function, *inputs, dims=None, tolerance=1e-10, passes=NORMALIZE):
    torch.manual_seed(0)
    model = Fn(function)
    named = dict(zip(("x", "y"), inputs, strict=False))
    gm = run(export_graph(model, (), named, dims), passes)
    check_values(gm)
    assert_same(gm, model, named, tolerance)
    return gm


def data(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
