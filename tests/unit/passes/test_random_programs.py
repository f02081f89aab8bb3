"""Random chains of layers, in-place ops, cuts and reshapes: normalizing never changes values or gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from passes import ANNOTATE, NORMALIZE, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph


def write_slice(h, w):
    h = h.clone()
    h[..., 1:3] = h[..., 0:2].clone()
    return h


def no_grad_scale(h, w):
    with torch.no_grad():
        scale = h.abs().amax() + 1
    return h / scale


STEPS = {
    "linear": lambda h, w: F.linear(h, w, w[0]),
    "flat linear": lambda h, w: F.linear(h.reshape(-1, 6), w).view(h.shape),
    "addmm": lambda h, w: torch.addmm(w[1], h.reshape(-1, 6), w).reshape(h.shape),
    "flat softmax": lambda h, w: torch.softmax(h.reshape(-1, 6), -1).view(h.shape),
    "flat mean": lambda h, w: h - h.reshape(-1, 6).mean(-1, keepdim=True).view(*h.shape[:-1], 1),
    "relu_": lambda h, w: (h * 1.5).relu_(),
    "add_": lambda h, w: (h * 2).add_(w[2]),
    "write slice": write_slice,
    "no grad": no_grad_scale,
    "chunk": lambda h, w: torch.cat(h.chunk(2, -1)[::-1], -1),
    "slices": lambda h, w: torch.cat((-h[..., 3:], h[..., :3]), -1),
    "heads": lambda h, w: h.view(*h.shape[:-1], 3, 2).transpose(1, 2).contiguous().transpose(1, 2).reshape(h.shape),
    "mean": lambda h, w: h * h.mean(),
    "residual": lambda h, w: h + torch.tanh(h @ w),
    "noops": lambda h, w: F.dropout(h.to(h.dtype).clone().view(h.shape), 0.0)[:, 0:],
}


class Chain(nn.Module):
    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.w = nn.Parameter(torch.randn(6, 6, dtype=torch.float64) * 0.4)

    def forward(self, x):
        for step in self.steps:
            x = STEPS[step](x, self.w)
        return x


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7))
def test_normalizing_changes_nothing(steps):
    torch.manual_seed(len(steps))
    model = Chain(steps)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    gm = run(export_graph(model, (), {"x": x}, {"x": {0: B, 1: S}}), NORMALIZE)
    check_values(gm)
    other_sizes = {"x": torch.randn(2, 7, 6, dtype=torch.float64)}
    assert_same(gm, model, other_sizes)
    assert_same(run(gm, ANNOTATE), model, other_sizes)
