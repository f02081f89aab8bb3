"""Steps of one stage in which more moves over slow links than compute hides: sums queue up behind the backward, beside
the last scatters on other axes. Within 2 % of the simulation."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopar import joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.problem.settings import Settings
from autopar.request import Request
from autopar.simulate import simulate

CLOSE = 0.02
BLOCKS = 14
"""More than are walked through one by one (pipeline.clock.MOST)."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class _Tied(nn.Module):
    """Blocks between an embedding and a head of the same weight."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@cache
def _captured() -> Captured:
    with torch.device("meta"):
        model, ids = _Tied(50_000, 1024).to(torch.bfloat16), torch.zeros(48, 512, dtype=torch.long)
    return capture(model, (ids,), {}, mode="train")


@pytest.mark.parametrize("cluster", ["rtx4090:2x8", "rtx4090:3x4"])
@pytest.mark.parametrize("recipe", ["ddp", "zero1", "hsdp", "tp_zero3"])
def test_what_queues_up_takes_as_long_as_priced(recipe: str, cluster: str) -> None:
    captured = _captured()
    request = Request(Cluster.parse(cluster), Settings(precision="bf16"), recipe=recipe, time_limit_s=10.0)
    made = joint.plan(captured.gm, captured.hints, request, model="tied", graph_hash=captured.graph_hash)
    took_s = simulate(captured.parted(made.parted).gm, made).step_s
    assert made.predicted.step_s == pytest.approx(took_s, rel=CLOSE)
