"""Layers of experts with biases and gates of their own, and such that are no `ops.experts`, whose grouped matmuls are
cut by groups, on ranks against one device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.plan import Plan
from autopar.verify import case_of
from passes import ops
from tests.helpers.verify import Subject, planned, verified

pytest.importorskip("transformers.integrations.moe")
EXPERTS, WIDTH, HIDDEN, TOP = 7, 12, 8, 2


class Biased(nn.Module):
    """Experts with biases and a clamped gate, as in gpt-oss, and a residual; `normed` between the layers, which columns
    cannot be by themselves."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.normed = normed
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH)),
            nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH)),
        )
        self.down, self.down_bias = (
            nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN)),
            nn.Parameter(torch.randn(EXPERTS, HIDDEN)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, HIDDEN)
        gates, chosen = self.gate(hidden).softmax(-1).topk(TOP, dim=-1)
        numbers, order = chosen.reshape(-1).sort()
        ends = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        inner = torch.ops.transformers.grouped_mm_fallback(hidden[order // TOP], self.up, ends) + self.up_bias[numbers]
        first, second = inner[:, ::2].clamp(max=2.0), inner[:, 1::2]
        inner = first * torch.sigmoid(1.7 * first) * (second + 1)
        inner = nn.functional.layer_norm(inner, [WIDTH]) if self.normed else inner
        out = torch.ops.transformers.grouped_mm_fallback(inner, self.down, ends) + self.down_bias[numbers]
        out = out * gates.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return ((x + out[back].view(-1, TOP, HIDDEN).sum(1).view(x.shape)) ** 2).mean()


def batch() -> torch.Tensor:
    """Tokens; some expert gets none of the first ones."""
    return torch.randn(4, 6, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def subject(normed: bool) -> Subject:
    """The layer, captured: two grouped matmuls where it is normed, else one call of a layer of experts."""
    torch.manual_seed(0)
    model = Biased(normed).double()
    captured = capture(model, (batch(),))
    assert [
        sum(node.target is target for node in captured.gm.graph.nodes) for target in (ops.grouped_matmul, ops.experts)
    ] == [2 * normed, not normed]
    return Subject("biased", "train", captured, model.state_dict())


def cut_by_groups(plan: Plan) -> int:
    """How many grouped matmuls each rank does for its own groups."""
    return sum("own_groups" in node.runs for node in plan.nodes.values())


@pytest.mark.parametrize(
    ("mesh", "how", "count"),
    [((2,), "ep", 2), ((4,), "ep", 2), ((2, 2), "ep", 2), ((2,), "zero3", 0), ((2, 2), "random 1", None)],
)
def test_experts_that_are_grouped_matmuls(mesh: tuple[int, ...], how: str, count: int | None) -> None:
    who = subject(True)
    plan = planned(who, mesh, how)
    if count is not None:
        assert cut_by_groups(plan) == count
    report = verified(case_of(who.captured, plan, who.weights, {"x": batch()}))
    assert report.ok, (report.first, report.worst)


@pytest.mark.parametrize(
    ("mesh", "how", "run"),
    [
        ((2,), "ep", "expert_dispatch"),
        ((4,), "ep", "expert_dispatch"),
        ((2, 2), "ep", "expert_dispatch"),
        ((2,), "tp", ""),
        ((4,), "zero3", ""),
        ((2, 2), "tp_zero3", ""),
        *(((2, 2), f"random {seed}", None) for seed in range(4)),
    ],
)
def test_experts_with_biases(mesh: tuple[int, ...], how: str, run: str | None) -> None:
    """Tokens, experts or the width of each cut, biases with them: pairs of columns stay together, and the second bias
    is added once."""
    who = subject(False)
    plan = planned(who, mesh, how)
    (layer,) = (node for name, node in plan.nodes.items() if name.startswith("experts"))
    assert run is None or run in layer.runs
    if how == "ep":
        assert plan.nodes["p_up_bias"].outs[0].startswith("S0") or len(mesh) > 1, "a bias rests where its experts do"
    report = verified(case_of(who.captured, plan, who.weights, {"x": batch()}))
    assert report.ok, (report.first, report.worst)
