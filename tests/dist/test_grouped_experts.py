"""Layers of experts that are no `ops.experts` (a bias per expert, another gate) on ranks: grouped matmuls cut by groups, against one device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.plan import Plan
from autopar.verify import case_of, verify
from passes import ops
from tests.helpers.verify import Subject, planned

pytest.importorskip("transformers.integrations.moe")
EXPERTS, WIDTH, HIDDEN, TOP = 7, 12, 8, 2


class Biased(nn.Module):
    """Experts with biases and a clamped gate, as in gpt-oss, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH)), nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down, self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN)), nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, HIDDEN)
        gates, chosen = self.gate(hidden).softmax(-1).topk(TOP, dim=-1)
        numbers, order = chosen.reshape(-1).sort()
        ends = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        inner = torch.ops.transformers.grouped_mm_fallback(hidden[order // TOP], self.up, ends) + self.up_bias[numbers]
        first, second = inner.chunk(2, -1)
        inner = first.clamp(max=2.0) * torch.sigmoid(1.7 * first) * (second + 1)
        out = torch.ops.transformers.grouped_mm_fallback(inner, self.down, ends) + self.down_bias[numbers]
        out = out * gates.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return ((x + out[back].view(-1, TOP, HIDDEN).sum(1).view(x.shape)) ** 2).mean()


def batch() -> torch.Tensor:
    """Tokens; some expert gets none of the first ones."""
    return torch.randn(4, 6, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def subject() -> Subject:
    """The layer, captured: two grouped matmuls."""
    torch.manual_seed(0)
    model = Biased().double()
    captured = capture(model, (batch(),))
    assert sum(node.target is ops.grouped_matmul for node in captured.gm.graph.nodes) == 2
    return Subject("biased", "train", captured, model.state_dict())


def cut_by_groups(plan: Plan) -> int:
    """How many grouped matmuls each rank does for its own groups."""
    return sum("own_groups" in node.runs for node in plan.nodes.values())


@pytest.mark.parametrize(("mesh", "how", "count"), [((2,), "ep", 2), ((4,), "ep", 2), ((2, 2), "ep", 2), ((2,), "zero3", 0), ((2, 2), "random 1", None)])
def test_experts_with_biases(mesh: tuple[int, ...], how: str, count: int | None) -> None:
    who = subject()
    plan = planned(who, mesh, how)
    if count is not None:
        assert cut_by_groups(plan) == count
    report = verify(case_of(who.captured, plan, who.weights, {"x": batch()}))
    assert report.ok, (report.first, report.worst)
