"""Two towers of unequal size: the search puts them side by side, wins by it, and what is emitted is exact on ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.buckets import BUCKET_BYTES
from autopar.bundle import Bundle
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.codegen.edges import spot_of
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.frontend import Loaded, load
from autopar.memory import predict
from autopar.onestage import finish, plan
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.read_graph import read
from autopar.problem.types import Problem, Solution
from autopar.recipes import RECIPES, roles
from autopar.request import Request
from autopar.runtime.gradsync import GradSync
from autopar.search import greedy
from autopar.verify import case_of, verify
from tests.helpers.peak import counted_on_rank
from tests.helpers.ranks import living
from tests.helpers.tiny import TINY

BATCH = 8


@cache
def towers() -> tuple[Loaded, Captured]:
    """The recommender: a user tower of two hidden layers, an item tower of one."""
    loaded = load(TINY["recommender"], batch=BATCH, seq=16, device="cpu")
    return loaded, capture(loaded.model, loaded.args, loaded.kwargs)


def small_gpus() -> Cluster:
    """Two H100 by their figures, whose ranks here run on the CPU: launches cost more than the work of a small layer."""
    data: dict[str, Any] = Cluster.parse("h100:1x2").to_dict()
    return Cluster.from_dict(data | {"device": data["device"] | {"kind": "cpu"}})


@cache
def searched() -> Plan:
    """What the free search finds, every recipe priced beside it."""
    _, captured = towers()
    return plan(
        captured.gm,
        captured.hints,
        Request(small_gpus(), time_limit_s=30.0),
        model="towers",
        graph_hash=captured.graph_hash,
    )


def check(made: Plan) -> None:
    loaded, captured = towers()
    batch = dict(zip(captured.input_names, [*loaded.args, *loaded.kwargs.values()], strict=True))
    report = verify(case_of(captured, made, loaded.model.state_dict(), batch), ranks=living(made.ranks))
    assert report.ok, (report.worst, report.first)


def test_the_search_puts_the_towers_side_by_side_and_wins() -> None:
    """Every launch counts: the towers at once save the shorter one, 0.21 ms against 0.26 ms for the best recipe."""
    made = searched()
    kinds = {name: node.kinds for name, node in made.nodes.items()}
    assert "operator" in kinds["linear_default"] and "operator" in kinds["linear_default_3"]
    assert made.nodes["linear_default"].factors != made.nodes["linear_default_3"].factors
    priced = {a.name: a.step_s for a in made.alternatives if a.step_s is not None}
    assert set(priced) >= {"single", "ddp", "tp"} and set(priced) <= set(RECIPES)
    assert made.predicted.step_s < 0.85 * min(priced.values())
    assert made.predicted.gap < 0.01


def test_the_towers_run_exactly() -> None:
    check(searched())


def scrambled(problem: Problem, seed: int) -> Solution:
    """Any solution that places what can be placed: costs are drawn, reshards are free."""
    rng = np.random.default_rng(seed)

    def drawn(cost_s: np.ndarray, lane: np.ndarray | None) -> np.ndarray:
        everywhere = np.zeros(len(cost_s), bool) if lane is None else lane < 0
        return np.where(np.isfinite(cost_s), rng.random(len(cost_s)) + 100.0 * everywhere, np.inf)

    nodes = tuple(replace(n, cost_s=drawn(n.cost_s, n.lane), lane=None, group=-1) for n in problem.nodes)
    nets = tuple(replace(n, cost_s=np.where(np.isfinite(n.cost_s), 0.0, np.inf), group=-1) for n in problem.nets)
    return greedy.search(replace(problem, nodes=nodes, nets=nets, lanes=(), groups=0), time_limit_s=5)


@pytest.mark.parametrize(("mesh", "seed"), [((2,), 1), ((2, 2), 1), ((2, 2), 2)])
def test_placements_compose_with_every_other_layout(mesh: tuple[int, ...], seed: int) -> None:
    _, captured = towers()
    planner = Planner.of(captured.gm, captured.hints, Request(Cluster.parse(f"cpu:1x{int(np.prod(mesh))}")))
    found = planner.candidate(
        mesh, (roles.anything,) * len(mesh), "scrambled", lambda problem: scrambled(problem, seed)
    )
    made = finish(planner, found, 0.0, [], {"model": "towers", "graph_hash": captured.graph_hash})
    assert any("operator" in node.kinds for node in made.nodes.values())
    check(made)


class Twins(nn.Module):
    """Two towers that share their weights, side by side: each weight is used on both ranks, and its gradient comes
    there at another time."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        near, far = self.head(self.tower(one)), self.tower(other)
        return (near @ near.T).pow(2).mean() + (near - far[:, :4]).pow(2).mean()


@cache
def twins() -> tuple[nn.Module, dict[str, torch.Tensor], Captured]:
    torch.manual_seed(0)
    model, batch = Twins(), (torch.randn(BATCH, 16), torch.randn(BATCH, 16))
    captured = capture(model, batch, {})
    return model, dict(zip(captured.input_names, batch, strict=True)), captured


@pytest.mark.parametrize("bucket_bytes", [1, 500, BUCKET_BYTES])
@pytest.mark.parametrize(("mesh", "seed"), [((2,), 0), ((2, 2), 1), ((2, 2), 3)])
def test_weights_of_two_branches_have_the_sum_of_their_gradients(
    mesh: tuple[int, ...], seed: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever came first on which rank, the same buckets begin in the same order with the same gradients in them."""
    monkeypatch.setattr(GradSync.__init__, "__defaults__", (bucket_bytes,))
    model, batch, captured = twins()
    planner = Planner.of(captured.gm, captured.hints, Request(Cluster.parse(f"cpu:1x{int(np.prod(mesh))}")))
    found = planner.candidate(
        mesh, (roles.anything,) * len(mesh), "scrambled", lambda problem: scrambled(problem, seed)
    )
    made = finish(planner, found, 0.0, [], {"model": "twins", "graph_hash": captured.graph_hash})
    assert len({spot_of(node) for name, node in made.nodes.items() if name.startswith("linear")} - {None}) > 1
    report = verify(case_of(captured, made, model.state_dict(), batch))  # on new ranks, which have the buckets
    assert report.ok, (report.worst, report.first)


def test_memory_is_counted_where_the_towers_are() -> None:
    """Each rank holds what works on it, and not what works on the other."""
    loaded, captured = towers()
    made = searched()
    bundle = Bundle(made, emit(captured.gm, made, Names.of(captured)), captured.constants)
    batch = dict(zip(captured.input_names, [*loaded.args, *loaded.kwargs.values()], strict=True))
    seen = living(2).run(counted_on_rank, bundle, loaded.model.state_dict(), batch)
    place = predict(read(captured.gm, made.hints, training=True, device="cpu"), made).fullest
    state = sum(nbytes for kind, nbytes in place.rest.items() if kind != "gradients")
    assert seen[0] != seen[1], "the towers are not alike"
    assert max(place.phases[p] for p in ("forward", "backward")) - state == pytest.approx(max(seen), rel=0.15)
