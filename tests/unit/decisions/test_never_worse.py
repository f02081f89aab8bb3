"""The search is never worse than any recipe, on any mesh, and what it says is proven is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.planner import Planner
from autopar.problem.presolve import presolve
from autopar.recipes import roles
from autopar.request import Request
from autopar.search import SEARCHES
from tests.unit.decisions.planning import Work, planned

WORKS = [Work("mlp", 16), Work("hf-gpt2", 8, 32), Work("hf-llama", 8, 32), Work("cnn", 16), Work("recommender", 32)]
CLUSTERS = ["cpu:1x4", "h100:2x2", "l4:1x4", "a100-80:1x2"]
FAST = [
    (WORKS[0], "cpu:1x4"),
    (WORKS[2], "cpu:1x4"),
    (WORKS[4], "a100-80:1x2"),
    (WORKS[0], "h100:2x2"),
    (WORKS[4], "cpu:1x4"),
]
SLOW = [case for work in WORKS for cluster in CLUSTERS if (case := (work, cluster)) not in FAST]


@pytest.mark.parametrize(
    ("work", "cluster"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda of: getattr(of, "model", of),
)
def test_never_worse_than_a_recipe(work: Work, cluster: str) -> None:
    made = planned(work, cluster)
    predicted = made.plan.predicted
    assert len(made.recipes_ms) >= 7, str(made)
    for other in made.plan.alternatives:
        assert other.step_s is None or predicted.step_s <= other.step_s * (1 + 1e-9), (other, str(made))
    assert predicted.bound_s <= predicted.step_s * (1 + 1e-9), str(made)


class Pair(nn.Module):
    """Two dense layers without biases: few enough decisions to try every combination."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 8, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(nn.functional.gelu(self.up(x))), y)


@pytest.mark.parametrize("memory_share", [1.0, 0.6])
def test_the_search_finds_the_optimum_of_a_real_graph(memory_share: float) -> None:
    """Every combination of choices on two ranks, without and with too little memory for the fastest."""
    graph = capture(Pair(), (torch.zeros(64, 64), torch.zeros(64, 8)), {})
    planner = Planner.of(graph.gm, graph.hints, Request(Cluster.parse("cpu:1x2")))
    problem, _ = presolve(planner.model((2,), (roles.anything,), "mlp").problem)
    free = SEARCHES["ilp"](problem, time_limit_s=10)
    limit = problem.price(free.choice).memory_bytes * memory_share
    tight = replace(problem, memory_limit_bytes=limit)
    assert np.prod([float(len(n.labels)) for n in tight.nodes]) <= 2e6, [len(n.labels) for n in tight.nodes]
    best = SEARCHES["exhaustive"](tight, time_limit_s=10)
    found = SEARCHES["ilp"](tight, time_limit_s=10)
    assert found.optimal
    assert tight.evaluate(found.choice).time_s == pytest.approx(tight.evaluate(best.choice).time_s, rel=1e-9)
    assert found.bound_s <= tight.evaluate(best.choice).time_s * (1 + 1e-9)
    assert memory_share == 1.0 or tight.evaluate(best.choice).time_s > problem.evaluate(free.choice).time_s
