"""Independent branches: which are found, and what placing them offers, forbids and costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.planner import Planner
from autopar.problem.branches import Branch, coordinate_of
from autopar.problem.build import Model
from autopar.recipes import roles
from autopar.request import Request
from autopar.search import SEARCHES
from passes import ANNOTATE, NORMALIZE, run
from tests.helpers.export import B, export_graph

TWO = Cluster.parse("h100:1x2")


class Forked(nn.Module):
    """Three branches of 3, 2 and 1 dense layers on one input, joined by a product, and a head."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((8, 12, 16, 8), (8, 16, 8), (8, 8))
        self.long, self.short, self.one = (nn.Sequential(*map(nn.Linear, w[:-1], w[1:])) for w in widths)
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.long(x)) * torch.tanh(self.short(x)) * torch.tanh(self.one(x))).sum()


class Towers(nn.Module):
    """Two branches on the input itself, one a run of four alike layers."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.wide = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.deep(x)) * torch.tanh(self.wide(x))).sum()


class Twins(nn.Module):
    """Two branches of six layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x) * self.other(x)).sum()


class Shared(Towers):
    """The same behind a layer: the run starts at a value that gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))


class Chained(nn.Module):
    """Two layers one after the other with a residual: nothing is independent."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.more = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.more(x)
        return (x + self.down(torch.tanh(self.up(x)))).sum()


@cache
def planner(kind: type[nn.Module], cluster: Cluster = TWO) -> Planner:
    """The planner of one model on two devices."""
    gm = export_graph(kind(), (torch.zeros(4, 8),), dims=({0: B},))
    gm.meta["outputs"] = [{"name": "loss", "kind": "loss", "target": ""}]
    return Planner.of(run(run(gm, NORMALIZE), ANNOTATE), {"b": 4}, Request(cluster))


def weights(found: Planner) -> dict[str, Branch]:
    """The branch of every weight that has one, by original name."""
    return {
        op.fqn: found.branches.of[name]
        for name, op in found.program.ops.items()
        if op.role == "param" and name in found.branches.of and op.fqn.endswith("weight")
    }


def test_branches_with_two_dense_layers_or_more() -> None:
    assert weights(planner(Forked)) == {
        **{f"long.{i}.weight": Branch(0, 0) for i in range(3)},
        **{f"short.{i}.weight": Branch(0, 1) for i in range(2)},
    }


def test_a_run_is_placed_as_a_whole_or_not_at_all() -> None:
    found = planner(Towers)
    blocks = [op.name for op in found.program.ops.values() if op.scope]
    assert blocks and dict.fromkeys(found.branches.of[name].region for name in blocks) == {0: None}
    assert not planner(Shared).branches.of


def test_a_residual_is_no_branch() -> None:
    assert not planner(Chained).branches.of


def test_options_of_a_placed_operator() -> None:
    found = planner(Forked)
    first, last = (
        next(
            op
            for op in found.program.ops.values()
            if op.role == "op" and any(found.program.ops[ref[0]].fqn == f"short.{i}.weight" for ref in op.operands)
        )
        for i in range(2)
    )
    one = found.branches.options(first, 4)[1]
    assert [str(u) for u in (*one.ins, *one.outs)] == ["R|P", "O1|O1", "O1|O1", "O1|O1"]  # input, weight, bias; result
    assert [str(u) for u in found.branches.options(last, 4)[1].ins] == ["O1|O1", "O1|O1", "O1|O1"]
    assert [coordinate_of(o) for o in found.branches.options(first, 4)] == [0, 1]
    assert not found.branches.options(first, 1)


def model(used: roles.Role) -> Model:
    return planner(Forked).model((2,), (used,), "forked")


def test_only_the_free_search_places() -> None:
    assert model(roles.anything).problem.lanes
    for recipe in (roles.nothing, roles.data, roles.tensor):
        assert not model(recipe).problem.lanes


def test_the_least_work_is_below_that_of_branches_side_by_side() -> None:
    """Every rank was to launch all operators: such a plan was faster than what was proven of all plans."""
    found = planner(Twins, replace(TWO, device=replace(TWO.device, launch_s=1.0)))  # little else takes any time
    problem = found.model((2,), (roles.anything,), "twins").problem
    step_s = problem.price(SEARCHES["ilp"](problem, time_limit_s=5).choice).time_s
    assert 0.6 * step_s < found.work("none").step_s(2, 1, 1) <= step_s


def test_a_branch_is_placed_whole() -> None:
    made = model(roles.anything)
    found = planner(Forked)
    for net in made.problem.nets:
        ends = [made.clusters[v].root for v in (net.producer, *(u.node for u in net.uses))]
        branches = [found.branches.of.get(op.name) for op in ends]
        if ends[0].role != "op" or branches[0] is None or any(b != branches[0] for b in branches):
            continue
        for c, row in zip(made.choices[net.producer], net.row, strict=True):
            for d, column in zip(made.choices[net.uses[0].node], net.uses[0].column, strict=True):
                same = coordinate_of(c[0].options[-1]) == coordinate_of(d[0].options[-1])
                assert (net.cost_s[row, column] < float("inf")) == same


@pytest.mark.parametrize(("coordinates", "share"), [((0, 1), 0.5), ((0, 0), 1.0)])
def test_side_by_side_costs_the_longer_one(coordinates: tuple[int, int], share: float) -> None:
    """Two lanes of one stretch: on different coordinates the shorter branch costs nothing."""
    problem = model(roles.anything).problem
    stretch = [s for s in problem.lanes if problem.lanes.count(s) == 2]
    assert stretch, "the branches share a stretch"
    work = torch.zeros(len(problem.lanes), 1).numpy()
    lanes = [i for i, s in enumerate(problem.lanes) if s == stretch[0]]
    for c in coordinates:
        work[lanes[c]] += 1.0
    assert problem.abreast_s(work)[0] == 2 * share
