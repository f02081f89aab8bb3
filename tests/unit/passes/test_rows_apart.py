"""Rows that come together for pointwise ops alone: taken apart where they are known to be that, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes import NORMALIZE, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets

E, D = 3, 4


def together(tokens: torch.Tensor, gates: torch.Tensor, twist: str) -> torch.Tensor:
    """`tokens` [n, D] for every expert, each times its gate [E, n], to [E, n, D]."""
    count = tokens.shape[0]
    if twist == "rows turned":
        return (tokens.repeat(E, 1) * gates.t().reshape(-1, 1)).reshape(count, E, D).transpose(0, 1)
    if twist == "columns repeated":
        return (tokens[:, : D // 2].repeat(E, 2) * gates.reshape(-1, 1)).reshape(E, -1, D)
    if twist == "rows one by one":
        return (tokens.repeat_interleave(E, 0) * gates.reshape(-1, 1)).reshape(E, -1, D)
    if twist == "other columns":
        return (tokens.repeat(E, 1) * gates.reshape(-1, 1)).reshape(E, -1, 2, D // 2).flatten(2)
    if twist == "more ops":
        return torch.tanh(2.0 * (tokens.repeat(E, 1) * torch.sigmoid(gates.reshape(-1, 1)) + tokens[0])).reshape(
            E, -1, D
        )
    if twist == "reshaped":
        return (torch.relu(gates.reshape(E, -1, 1).expand(-1, -1, D).reshape(-1, D)) * tokens.repeat(E, 1)).view(
            E, count, D
        )
    return (tokens.repeat(E, 1) * gates.reshape(-1, 1)).reshape(E, -1, D)


class Routed(nn.Module):
    """Llama 4's experts in small: all experts see all tokens, each times its gate."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.twist = twist
        self.gate = nn.Linear(D, E, bias=False, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(E, D, D, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, D)
        gates = self.gate(tokens).sigmoid().t()
        return torch.bmm(together(tokens, gates, self.twist), self.weight).sum(0).reshape(x.shape)


def normalized(twist: str):
    torch.manual_seed(0)
    model = Routed(twist)
    gm = run(export_graph(model, (), {"x": torch.randn(4, 8, D, dtype=torch.float64)}, {"x": {0: B, 1: S}}), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, {"x": torch.randn(3, 6, D, dtype=torch.float64)})
    return targets(gm)


@pytest.mark.parametrize("twist", ["", "more ops", "reshaped"])
def test_rows_of_all_experts_are_apart(twist: str) -> None:
    """Experts and tokens are dims of their own all along: nothing is repeated."""
    assert "aten.repeat.default" not in normalized(twist)


@pytest.mark.parametrize("twist", ["rows turned", "columns repeated", "rows one by one", "other columns"])
def test_rows_in_another_order_stay(twist: str) -> None:
    """The result is the same, whatever was done."""
    normalized(twist)
