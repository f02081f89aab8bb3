"""Descent by the price of a step: moves of the State that says what is worth pricing, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autopar import bestfirst
from autopar.buckets import BUCKET_BYTES
from autopar.candidate import Candidate
from autopar.cluster import Cluster
from autopar.cost.comm import link_shares
from autopar.pipeline.honing_state import HoningState
from autopar.pipeline.passes import Passes
from autopar.pipeline.single_stage import step_cost
from autopar.planner import Planner
from autopar.problem import leaf_gathers as leaves_of
from autopar.problem.hiding import Load, together_s
from autopar.problem.pass_quantities import COMPUTE, SHOWN, WAITED
from autopar.problem.pass_tables import PassTables
from autopar.problem.settings import Settings
from autopar.problem.types import Problem
from autopar.recipes.free import space
from autopar.request import Request
from autopar.search import ilp
from autopar.search.descent import fits
from autopar.search.honing import honed
from autopar.search.state import Penalty, State
from autopar.timer import Timer
from tests.helpers.problems import problems
from tests.helpers.verify import subject

MESH = (2, 2)


@pytest.fixture(scope="module")
def planner() -> Planner:
    who = subject("hf-gpt2")
    return Planner.of(
        who.captured.gm, {**who.captured.hints, "b": 512}, Request(Cluster.parse("h100:2x2"), Settings("train"))
    )


@pytest.fixture(scope="module")
def found(planner: Planner) -> Candidate:
    return planner.candidate(MESH, space(MESH), "search", lambda problem: ilp.glance(problem, time_limit_s=10))


@given(problems(nodes=5))
@settings(max_examples=60, deadline=None)
def test_no_move_of_one_node_or_two_is_better_by_the_price(problem: Problem) -> None:
    """With the Problem's own price the State says exactly what is worth pricing, so that nothing that gains is left
    out."""
    start = tuple(0 for _ in problem.nodes)
    if not fits(problem, start):
        return

    def price_s(choice: tuple[int, ...]) -> float:
        return problem.price(choice).time_s if fits(problem, choice) else math.inf

    best, best_s = honed(State(problem, start), start, price_s)
    assert fits(problem, best)
    assert best_s == price_s(best) <= price_s(start)
    for v, node in enumerate(problem.nodes):
        for c in range(len(node.labels)):
            assert price_s((*best[:v], c, *best[v + 1 :])) >= best_s * (1 - 1e-4)


def test_totals_of_passes_after_moves_are_those_from_the_begin(planner: Planner, found: Candidate) -> None:
    passing = PassTables(found.model, planner.forward(found.mesh), sums_at_end=False)
    state, rng = HoningState(passing, found.solution.choice), np.random.default_rng(0)
    for _ in range(20):
        v = int(rng.integers(len(state.choice)))
        state.move(v, int(rng.integers(len(found.model.problem.nodes[v].labels))))
    assert np.allclose(state.totals, HoningState(passing, tuple(state.choice)).totals, rtol=1e-9, atol=1e-12)


def test_what_a_move_makes_of_leaves_that_are_ahead_is_exact(
    planner: Planner, found: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many small blocks have exposed leaves depends on what all of their weights gather: here half a bucket is the
    leaves of several blocks."""
    monkeypatch.setattr(leaves_of, "BUCKET_BYTES", 60_000)
    model, forward = found.model.with_limit(math.inf), planner.forward(found.mesh)
    state, rng, shares = (
        HoningState(PassTables(model, forward, sums_at_end=False), found.solution.choice),
        np.random.default_rng(0),
        set[float](),
    )
    [leaves] = state.leaves.values()
    for _ in range(8):
        for v in set(leaves.nodes):
            ahead = state.after_all(v)[leaves.row]
            for c in range(0, len(ahead), 3):
                choice = (*state.choice[:v], c, *state.choice[v + 1 :])
                shares |= (
                    filled := set(
                        Passes(
                            planner.program, model, choice, forward, apart=False, sums_at_end=False
                        ).buckets.share_ahead.values()
                    )
                )
                assert [pytest.approx(ahead[c])] == list(filled or {1.0})
        v = int(rng.choice(leaves.nodes))
        state.move(v, int(rng.integers(len(model.problem.nodes[v].labels))))
    assert len(shares) > 1


def test_a_pass_takes_what_it_takes_in_the_price(planner: Planner, found: Candidate) -> None:
    """Of loads that take of each link what large ones take; the rest alone at the end is rounded up to what links can
    move."""
    passing = PassTables(found.model, planner.forward(found.mesh), sums_at_end=False)
    state, rng = HoningState(passing, found.solution.choice), np.random.default_rng(0)
    each = [link_shares("all_gather", axis.size * BUCKET_BYTES, axis) for axis in found.mesh.axes]
    of = np.zeros((passing.width, 200))
    of[COMPUTE] = rng.uniform(1.0, 10.0, 200)
    of[passing.behind(0) : passing.behind(0) + 2] = rng.uniform(0.0, 8.0, (2, 200)) * rng.integers(0, 2, (2, 200))
    of[passing.ahead(0) : passing.ahead(0) + 2] = rng.uniform(0.0, 2.0, (2, 200))
    of[passing.waits(0) : passing.waits(0) + 2] = rng.uniform(0.0, 3.0, (2, 200)) * rng.integers(0, 2, (2, 200))
    of[WAITED] = of[passing.waits(0) : passing.waits(0) + 2].sum(0)
    of[SHOWN] = of[COMPUTE] + of[WAITED]
    took_s = state._together_s(of)
    for column in range(200):
        behind = [
            Load(axis, of[passing.ahead(axis), column] + of[passing.behind(axis), column], each[axis])
            for axis in range(2)
        ]
        waited = [Load(axis, of[passing.waits(axis), column], each[axis]) for axis in range(2)]
        priced_s = together_s(
            of[COMPUTE, column], [load for load in waited if load.seconds], behind, passing.model.prices.contention
        )
        assert took_s[column] == pytest.approx(priced_s, rel=0.01)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_gathers_of_blocks_that_begin_a_stage_have_nothing_in_front_of_them(
    planner: Planner, found: Candidate, share: float
) -> None:
    """Their share of what is gathered ahead is shown: no less time than before, no more than all of that more, and that
    much where nothing hides."""
    passing = PassTables(found.model.with_limit(math.inf), planner.forward(found.mesh), sums_at_end=True)
    state, scope = HoningState(passing, found.solution.choice), next(scope for scope in passing.scopes if scope)
    opened = HoningState(passing, found.solution.choice, opening={scope: share})
    rng, width = np.random.default_rng(0), passing.width
    for _ in range(20):
        v = int(rng.integers(len(state.choice)))
        c = int(rng.integers(len(state.problem.nodes[v].labels)))
        state.move(v, c)
        opened.move(v, c)
        first = state.first[scope]
        ahead_s = sum(
            float(state.totals[first + way * width + passing.ahead(axis), 0])
            for way in (0, 1)
            for axis in range(passing.axes)
        )
        before_s, after_s = (float(each.seconds(each.totals)[0]) for each in (state, opened))
        assert before_s * (1 - 1e-9) <= after_s <= before_s + share * ahead_s * (1 + 1e-9)
    alone = np.zeros((width, 1))
    alone[passing.ahead(0)] = 1.0
    assert state._together_s(alone, share)[0] == pytest.approx(1.0)


def test_seconds_of_passes_are_near_those_of_the_step(planner: Planner, found: Candidate) -> None:
    """Of the solution, and of all that differ by one choice that may be; memory and what is forbidden are the
    Problem's."""
    model, forward = found.model.with_limit(math.inf), planner.forward(found.mesh)
    state = HoningState(PassTables(model, forward, sums_at_end=False), found.solution.choice)
    columns, asked = state.totals + state.changes(), 0
    seconds = state.score(columns, Penalty(0.0, 0.0))
    off = []
    for column in range(0, columns.shape[1], 7):
        v = int(np.searchsorted(state.starts, column, side="right")) - 1
        choice = (*found.solution.choice[:v], column - int(state.starts[v]), *found.solution.choice[v + 1 :])
        cost = model.problem.price(choice)
        assert (columns[2, column] < 0.5) == cost.feasible
        if cost.feasible:
            assert columns[1, column] == pytest.approx(cost.memory_bytes)
            off.append(seconds[column] / step_cost(model, choice, forward).time_s - 1)
            asked += 1
    assert asked > 20
    assert np.abs(off).max() < 0.1 and np.std(off) < 0.02


@pytest.mark.parametrize("room", [1.0, pytest.param(1.3, marks=pytest.mark.slow)])
def test_a_candidate_that_is_honed_fits_and_is_faster(planner: Planner, found: Candidate, room: float) -> None:
    """From a solution that is not the best of its mesh, and with little memory."""
    limited = replace(planner, request=replace(planner.request, memory_bytes=room * found.peak))
    start = limited.candidate(MESH, space(MESH), "search", lambda problem: ilp.glance(problem, time_limit_s=10))
    slower = [
        c
        for c in _neighbours(start)
        if c.cost.time_s > start.cost.time_s * 1.02 and limited.counted(c).peak <= limited.request.limit_bytes
    ][:3]
    assert slower
    for each in slower:
        better = limited.honed(each, lambda: False)
        assert better.cost.time_s < each.cost.time_s
        assert limited.counted(replace(better)).peak == better.peak <= limited.request.limit_bytes
        assert better.cost.time_s == pytest.approx(
            step_cost(better.model, better.solution.choice, limited.forward(better.mesh)).time_s
        )


@pytest.mark.parametrize(
    ("promised", "wanted"),
    [((), {(8, 8): 0.96}), (((64,),), {(8, 8): 0.96, (64,): 0.9696}), (((32, 2),), {(8, 8): 0.96, (32, 2): 0.9792})],
)
def test_of_other_meshes_a_tangent_says_whether_they_are_honed(
    promised: tuple[tuple[int, ...], ...], wanted: dict[tuple[int, ...], float]
) -> None:
    """Of one that linear prices prove slower than another takes honed, whether it becomes faster; of others whether it
    comes near."""

    def candidate(sizes: tuple[int, ...], bound_s: float, time_s: float) -> SimpleNamespace:
        return SimpleNamespace(
            mesh=SimpleNamespace(sizes=sizes),
            cost=SimpleNamespace(time_s=time_s),
            solution=SimpleNamespace(bound_s=bound_s),
        )

    asked: dict[tuple[int, ...], float] = {}

    def promises(each: SimpleNamespace, below_s: float) -> bool:
        asked[each.mesh.sizes] = below_s
        return each.mesh.sizes in promised

    def honed(each: SimpleNamespace, late: Callable[[], bool]) -> SimpleNamespace:
        return candidate(each.mesh.sizes, each.solution.bound_s, 0.96 * each.cost.time_s)

    planner: Any = SimpleNamespace(request=SimpleNamespace(say=lambda text: None), honed=honed, promises=promises)
    fit: Any = [
        candidate((8, 8), 0.90, 1.0),
        candidate((64,), 0.97, 1.01),
        candidate((32, 2), 0.95, 1.02),
        candidate((4, 16), 0.99, 1.2),
    ]
    found = {each.mesh.sizes: each.cost.time_s for each in bestfirst._honed(planner, fit, 1.0, Timer(60.0).skips)}
    assert found == pytest.approx(wanted)
    assert asked == pytest.approx({(64,): 0.96, (32, 2): 0.96 * 1.01}), (
        "the first is honed in any case, what is far off is not asked for"
    )


def _neighbours(found: Candidate) -> list[Candidate]:
    """Those that differ in one choice and fit its Problem."""
    problem, made = found.model.problem, []
    for v, node in enumerate(problem.nodes):
        for c in range(0, len(node.labels), 5):
            choice = (*found.solution.choice[:v], c, *found.solution.choice[v + 1 :])
            if fits(problem, choice):
                made.append(found.refined(replace(found.solution, choice=choice)))
    return made
