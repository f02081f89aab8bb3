"""Plans of one stage that run some of their blocks again: as few as fit, priced as they run."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from autopar import onestage
from autopar.bare_plan import laid
from autopar.candidate import Candidate
from autopar.cluster import Cluster
from autopar.memory import predict
from autopar.named_strategies import best_named
from autopar.onestage import plan
from autopar.partial_remat import filled
from autopar.pipeline.single_stage import step_cost
from autopar.plan import Plan
from autopar.plan_suits_graph import suits
from autopar.planner import Planner
from autopar.problem.remat import rematerialised
from autopar.problem.remat_choices import choices
from autopar.recipes import RECIPES
from autopar.request import Request
from autopar.search import ilp
from autopar.simulate.stages import Stages
from autopar.timer import Timer
from tests.helpers.planned import graph

# blocks keep more than all gradients take, which are there when the first block runs again
HINTS, LAYERS, SCOPE = {"b": 8192}, 6, "layers_0"


@cache
def planner_of(limit_bytes: float | None = None) -> Planner:
    """The stack on four CPU ranks."""
    return Planner.of(graph(LAYERS), HINTS, Request(Cluster.parse("cpu:1x4"), memory_bytes=limit_bytes))


def candidate(planner: Planner, recipe: str, level: str) -> Candidate:
    """A recipe with all blocks at a level."""
    planner.remat = planner.levels(level)
    return planner.candidate((4,), RECIPES[recipe].roles, recipe, partial(ilp.search, time_limit_s=5.0))


@cache
def between(recipe: str) -> tuple[Candidate, Candidate]:
    """It with no blocks run again, and with all of them whole."""
    none, full = (candidate(planner_of(), recipe, level) for level in ("none", "full"))
    assert none.cost.memory_bytes > full.cost.memory_bytes and none.cost.time_s < full.cost.time_s
    return none, full


def limits(recipe: str, shares: tuple[float, ...]) -> list[float]:
    """Bytes between what both take, by both counts."""
    none, full = between(recipe)
    least, most = (max(each.cost.memory_bytes, each.peak) for each in (full, none))
    return [least + share * (most - least) for share in shares]


def made_with(**about: Any) -> Plan:
    """The plan of the stack under a request with these fields."""
    request = Request(Cluster.parse("cpu:1x4"), **about)
    return plan(graph(LAYERS), HINTS, request, model="stack", graph_hash="0" * 64)


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "megatron"])
def test_the_more_memory_there_is_the_less_time_it_takes(recipe: str) -> None:
    """From all blocks run again whole to none at all, and never with more memory than there is."""
    steps = []
    for limit_bytes in limits(recipe, (0.0, 0.3, 0.6, 0.9, 1.0)):
        planner = planner_of().anew(replace(planner_of().request, memory_bytes=limit_bytes))
        made = filled(planner, candidate(planner, recipe, "full"))
        assert max(made.cost.memory_bytes, made.peak) <= limit_bytes * (1 + 1e-9)
        steps.append(made.cost.time_s)
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == len(steps)
    assert steps[-1] == pytest.approx(between(recipe)[0].cost.time_s) and not made.remat


@pytest.mark.parametrize(
    ("recipe", "share"), [("zero3", 0.5), ("megatron", 0.3), pytest.param("ddp", 0.75, marks=pytest.mark.slow)]
)
def test_no_corners_with_any_numbers_of_blocks_are_faster(recipe: str, share: float) -> None:
    """Against all that there are, counted and walked one by one."""
    (limit_bytes,) = limits(recipe, (share,))
    planner = planner_of().anew(replace(planner_of().request, memory_bytes=limit_bytes))
    full = candidate(planner, recipe, "full")
    made, plain, forward, choice = (
        filled(planner, full),
        full.model.plainly.with_limit(float("inf")),
        planner.forward(full.mesh),
        full.solution.choice,
    )
    corners = choices(plain, forward, choice, SCOPE).corners
    cost = {None: step_cost(plain, choice, forward)}
    for corner in corners:
        cost[corner.kept] = step_cost(rematerialised(plain, forward, {SCOPE: corner.kept}), choice, forward)
    fit_s = []
    for first, rest, n in itertools.product(cost, cost, range(1, LAYERS + 1)):
        if first is None or (n == LAYERS and rest is not None):
            continue
        way = replace(
            full, remat={SCOPE: first}, again={SCOPE: n}, rest={} if rest is None else {SCOPE: rest}, peak_bytes=None
        )
        least, most = cost[rest], cost[first]
        nbytes = least.memory_bytes + n / LAYERS * (most.memory_bytes - least.memory_bytes)
        if max(nbytes, planner.counted(way).peak) <= limit_bytes:
            fit_s.append(least.time_s + n / LAYERS * (most.time_s - least.time_s))
    assert made.cost.time_s == pytest.approx(min(fit_s), rel=1e-6)
    assert made.again and made.cost.time_s < full.cost.time_s


def test_a_plan_that_runs_some_blocks_again_takes_what_is_said() -> None:
    """What is planned where memory is short, as it is walked and simulated; a recipe that is priced along the way takes
    no less."""
    (limit_bytes,) = limits("zero3", (0.5,))
    made = made_with(recipe="zero3", memory_bytes=limit_bytes)
    (count,) = made.stages[0].again.values()
    assert 0 < count < LAYERS and f"layers_0 (the first {count})" in made.run_again
    assert made.predicted.memory_bytes == predict(planner_of().program, made).peak_bytes <= limit_bytes
    lengths = [
        Stages.of(graph(LAYERS), replace(made, stages=(replace(made.stages[0], again={SCOPE: n}),))).whole().length_s
        for n in range(LAYERS + 1)
    ]
    assert [b - a for a, b in itertools.pairwise(lengths)] == pytest.approx(
        [(lengths[-1] - lengths[0]) / LAYERS] * LAYERS
    )
    assert made.predicted.step_s - between("zero3")[0].cost.time_s == pytest.approx(
        lengths[count] - lengths[0], rel=0.02
    )
    assert all(row.step_s is None or row.step_s >= made.predicted.step_s * (1 - 1e-9) for row in made.alternatives)


def test_a_plan_whose_blocks_keep_different_results_takes_what_is_said() -> None:
    """Three blocks keep nothing and three one result each: one of it for all takes more time, the other more memory."""
    (limit_bytes,) = limits("megatron", (0.3,))
    made = made_with(recipe="megatron", memory_bytes=limit_bytes)
    assert made.parted == {SCOPE: {"layers_3": 3}} and not made.stages[0].again
    assert made.run_again.startswith(f"{SCOPE}, whole; layers_3, keeping ")
    parted = planner_of().parted(made.parted)
    assert made.predicted.memory_bytes == predict(parted.program, made).peak_bytes <= limit_bytes
    assert Plan.from_json(made.to_json()) == made
    alike = [
        replace(
            made, remat={scope: tuple(f"{scope}/{name.rpartition('/')[2]}" for name in kept) for scope in made.remat}
        )
        for kept in made.remat.values()
    ]
    less, more, both = (Stages.of(parted.gm, each).whole().length_s for each in (*alike, made))
    assert both == pytest.approx((less + more) / 2, rel=1e-6) and less > both > more
    assert made.predicted.step_s - between("megatron")[0].cost.time_s == pytest.approx(
        both - Stages.of(parted.gm, replace(made, remat={})).whole().length_s, rel=0.02
    )
    assert predict(parted.program, alike[1]).peak_bytes > limit_bytes


@pytest.mark.parametrize("recipe", ["zero3", "megatron"])
def test_a_part_of_one_block_has_the_layouts_of_the_run(recipe: str) -> None:
    """The first block reads an input, which has no gradient; what the later ones read has one."""
    full = candidate(planner_of(), recipe, "full")
    kept = choices(
        full.model.plainly.with_limit(float("inf")), planner_of().forward(full.mesh), full.solution.choice, SCOPE
    ).corners[-1]
    made = laid(planner_of(), replace(full, again={SCOPE: 1}, rest={SCOPE: kept.kept}))
    assert made.parted == {SCOPE: {"layers_1": 1}}
    parted = planner_of().parted(made.parted)
    suits(parted.gm, made, None)
    whole = replace(laid(planner_of(), full), remat={})
    assert Stages.of(parted.gm, replace(made, remat={})).whole().length_s == pytest.approx(
        Stages.of(graph(LAYERS), whole).whole().length_s
    )


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "megatron"])
@pytest.mark.parametrize("level", ["full", "selective"])
def test_each_block_that_is_run_again_keeps_as_much_less_as_the_next(recipe: str, level: str) -> None:
    """From none of six to all, as walked: also where the last one is the only one that is not."""
    made = made_with(recipe=recipe, remat=level)
    kept = [
        predict(
            planner_of().program, replace(made, stages=(replace(made.stages[0], again={SCOPE: n}),))
        ).fullest.kept_bytes[0]
        for n in range(LAYERS + 1)
    ]
    freed = [a - b for a, b in itertools.pairwise(kept)]
    assert freed == pytest.approx([freed[0]] * LAYERS) and freed[0] > 0


def test_all_blocks_are_run_again_where_that_was_asked_for() -> None:
    planner = planner_of().anew(replace(planner_of().request, remat="full"))
    full = candidate(planner, "zero3", "full")
    assert filled(planner, full) is full and not full.again


def test_what_was_too_late_to_be_run_again_is_not_proven_to_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are short of memory, and time is up when plans with nothing run again have been looked at."""
    (limit_bytes,) = limits("zero3", (0.6,))
    request = Request(Cluster.parse("cpu:1x4"), mesh=(4,), memory_bytes=2 * limit_bytes)

    def bound_s(request: Request) -> float:
        return plan(graph(LAYERS), HINTS, request, model="stack", graph_hash="0" * 64).predicted.bound_s

    assert bound_s(request) > 0
    monkeypatch.setattr(onestage._Levels, "_enough", lambda levels, name: levels.fastest is not None)
    assert bound_s(replace(request, memory_bytes=limit_bytes)) == 0
    assert bound_s(replace(request, remat="none")) > 0


def test_recipes_that_are_slower_than_what_is_known_run_all_blocks_again() -> None:
    """Known of one stage, or of pipelines, which are asked once all recipes are priced."""
    (limit_bytes,) = limits("megatron", (0.6,))
    asked: list[float] = []

    def steps_s(known_s: float, pipeline_s: float = math.inf) -> dict[str, float]:
        planner = planner_of().anew(replace(planner_of().request, memory_bytes=limit_bytes))
        planner.remat = planner.levels("full")
        _, tried = best_named(planner, Timer(60.0), known_s, lambda known_s: asked.append(known_s) or pipeline_s)
        return {row.name: row.step_s for row in tried if row.step_s is not None}

    fastest, all_again = steps_s(math.inf), steps_s(1e-9)
    assert asked == [min(all_again.values()), 1e-9]
    assert fastest.keys() == all_again.keys() and all_again == steps_s(math.inf, 1e-9)
    assert any(fastest[name] < step_s for name, step_s in all_again.items())
    full = candidate(planner_of().anew(replace(planner_of().request, memory_bytes=limit_bytes)), "megatron", "full")
    assert all_again["megatron"] == pytest.approx(full.cost.time_s)
