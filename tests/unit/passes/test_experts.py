"""Layers of experts: recognised in their sorted form, and only where they are one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes import NORMALIZE, facts, ops, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets

E, D, WIDTH, K = 4, 6, 3, 2


class Experts(nn.Module):
    """Routed, sorted, through two grouped matmuls, and back, as Hugging Face writes it; `twist` names what is different."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.twist = twist
        self.gate = nn.Linear(D, E, bias=False, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(E, D, 2 * WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(E, WIDTH, D, dtype=torch.float64))

    def forward(self, x):
        hidden = x.reshape(-1, D)
        gates, chosen = self.gate(hidden).softmax(-1).topk(K, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        numbers, order = chosen.reshape(-1).sort(descending=self.twist == "sorted down")
        ends = torch.histc(numbers.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        if self.twist == "other ends":
            ends = ends // 2
        inner = torch.ops.transformers.grouped_mm_fallback(hidden[order // K], self.up, ends)
        first, second = inner.chunk(2, -1)
        inner = {"gelu": F.gelu(first) * second, "swapped": F.silu(second) * first, "tanh": torch.tanh(first) * second}.get(
            self.twist, F.silu(first) * second)
        out = torch.ops.transformers.grouped_mm_fallback(inner, self.down, ends)
        out = out * gates.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        if self.twist == "not back":
            back = order
        return out[back].view(-1, K, D).sum(1).view(x.shape)


def normalized(twist):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Experts(twist)
    inputs = {"x": torch.randn(4, 8, D, dtype=torch.float64)}
    gm = export_graph(model, (), inputs, {"x": {0: B, 1: S}})
    gm = run(gm, NORMALIZE)
    check_values(gm)
    return gm, model, inputs


@pytest.mark.parametrize("twist", ["", "gelu"])
def test_a_layer_of_experts_is_one_op_on_tokens_that_stay_apart(twist):
    gm, model, inputs = normalized(twist)
    assert_same(gm, model, inputs, 1e-10)
    (layer,) = [node for node in gm.graph.nodes if node.target is ops.experts]
    assert layer.args[5] == (twist or "silu")
    assert [len(facts.shape(node)) for node in layer.args[:3]] == [3, 3, 3]
    assert not {"aten.sort.default", "aten.reshape.default", "aten.index.Tensor"} & set(targets(gm))


@pytest.mark.parametrize("twist", ["swapped", "tanh", "sorted down", "other ends", "not back"])
def test_anything_else_stays(twist):
    gm, _, _ = normalized(twist)
    assert not any(node.target is ops.experts for node in gm.graph.nodes)
    assert sum(node.target is ops.grouped_matmul for node in gm.graph.nodes) == 2
