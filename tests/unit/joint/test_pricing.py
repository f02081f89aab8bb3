"""The price of a shape: what becomes of it where its fastest answer, as the glance has it, does not fit when its memory
is walked; and what timetables get that take the backward apart."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import pricing as module
from autopar.joint import search_context, stage_times, staging
from autopar.joint.pricing import Pricing
from autopar.joint.prove import Prover
from autopar.joint.scattering import scattered
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH, of_recipe
from autopar.joint.staging import Found, lay
from autopar.joint.timetables import Kind
from autopar.joint.ways import fastest
from autopar.memory import Entry, Prediction, predict
from autopar.pipeline import views
from autopar.pipeline.stretches import stage_time
from autopar.problem.at_rest import EACH
from autopar.problem.settings import Settings
from autopar.recipes.pipelines import PIPELINES, PipelineRecipe
from autopar.recipes.roles import scattering
from autopar.request import Request
from autopar.search import ilp
from autopar.timer import Timer
from tests.helpers.planned import graph
from tests.helpers.verify import subject

SHAPE = Shape(2, (1,), 4)
KINDS = (Kind("1f1b"), Kind("interleaved_1f1b", 2), Kind("zbv_zero_bubble", 2))


def glanced() -> tuple[Pricing, Found]:
    who = subject("hf-gpt2")
    context = SearchContext(
        who.captured.gm,
        {**who.captured.hints, "b": 64},
        Request(Cluster.parse("h100:1x2"), Settings("train"), time_limit_s=math.inf),
    )
    pricing = Pricing(context, replace(SEARCH, kinds=KINDS))
    return pricing, pricing.glance(SHAPE, math.inf)


def test_the_next_best_of_the_glance_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pricing, found = glanced()
    others = [way for way in pricing.laid[SHAPE] if way.table != found.table]
    assert others, "the glance lays out more than one"
    tried: list[str] = []

    def fits(*args: Any, whole: bool = False, shifts: bool = True) -> Found:
        table = args[3]
        if whole:
            tried.append(table.kind.schedule)
        if whole and table == found.table:
            raise InfeasibleError("a peak that no glance sees")
        return lay(*args, whole=whole, shifts=shifts)

    monkeypatch.setattr(module, "lay", fits)
    exact = pricing.exact(found)
    second = min(others, key=lambda way: way.step_s)
    assert exact is not None and exact.table == second.table
    assert tried[0] == found.table.kind.schedule and second.step_s >= found.step_s
    assert all(exact.step_s <= way.step_s * 1.05 for way in others if way.table != exact.table), (
        "what was not tried promised no more"
    )


def test_nothing_else_is_laid_out_where_the_fastest_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pricing, found = glanced()
    tables = []

    def seen(*args: Any, whole: bool = False, shifts: bool = True) -> Found:
        if whole:
            tables.append(args[3])
        return lay(*args, whole=whole, shifts=shifts)

    monkeypatch.setattr(module, "lay", seen)
    exact = pricing.exact(found)
    assert exact is not None and exact.step_s == pytest.approx(found.step_s, rel=0.01)
    assert {table.kind for table in tables} == {found.table.kind}


@pytest.mark.parametrize("late", [False, True])
def test_once_time_is_up_the_exact_solution_and_that_of_the_glance_are_enough(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pipeline of 128 stages each of the others takes seconds. That it comes out slower than at the glance is what
    makes them worth a try. (Both are the same here, which is laid out once.)"""
    pricing, found = glanced()
    pricing.context.timer = timer = Timer(0.0 if late else math.inf)
    tried: list[Kind] = []

    def slower(*args: Any, whole: bool = False, shifts: bool = True) -> Found:
        made = lay(*args, whole=whole, shifts=shifts)
        tried.extend([made.table.kind] * whole)
        return replace(made, step_s=2 * made.step_s)

    monkeypatch.setattr(module, "lay", slower)
    exact = pricing.exact(found)
    assert exact is not None and timer.hurried == late
    assert tried == [found.table.kind] if late else len({*tried}) > 1


@pytest.mark.parametrize("late", [False, True])
def test_where_the_exact_solution_does_not_fit_that_of_the_glance_is_next(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is worked out that memory may be filled with, where time is up."""
    pricing, found = glanced()
    pricing.context.timer = Timer(0.0 if late else math.inf)
    asked: list[Found | None] = []

    def full(*args: Any, **more: Any) -> Found:
        raise InfeasibleError("too large")

    def kept(found: Found, solved: Found | None) -> list[Any]:
        asked.append(solved)
        return []

    monkeypatch.setattr(pricing, "price", full)
    monkeypatch.setattr(pricing, "_kept_otherwise", kept)
    exact = pricing.exact(found)
    assert exact is not None and exact.table == found.table
    assert asked == ([] if late else [None])


@pytest.mark.parametrize(("late", "tried"), [(False, [5, 4, 3, 1]), (True, [5, 4])])
def test_ways_behind_the_first_that_fits_wait_for_time(late: bool, tried: list[int]) -> None:
    """What does not fit is no answer, however late it is."""
    seen: list[int] = []

    def price(way: int) -> Any:
        seen.append(way)
        if way == 5:
            raise InfeasibleError("too large")
        return SimpleNamespace(step_s=float(way))

    assert fastest([5, 4, 3, 4, 1], price, lambda way: float(way), lambda: late).step_s == tried[-1]
    assert seen == tried


@pytest.mark.parametrize("full", [0, 1])
def test_room_for_what_the_walk_finds_on_one_place_is_reserved_on_that_place(
    monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    """Of two places of six blocks each that run some of these again, one has as much as a block keeps beyond the sum of
    its pieces: it runs more of them again, the other as few as before."""
    shape, whole = (
        Shape(2, (1,), 4),
        SearchContext(graph(12), {"b": 4096}, Request(Cluster.parse("h100:1x2"), Settings("train"))),
    )
    roomy = Pricing(whole, replace(SEARCH, kinds=(Kind("1f1b"),))).glance(shape, math.inf)
    pricing = Pricing(whole.limited(0.9 * roomy.memory_bytes), replace(SEARCH, kinds=(Kind("1f1b"),)))
    glanced = pricing.glance(shape, math.inf)
    arguments = pricing.context, SEARCH.name, shape, glanced.table, glanced.ground, glanced.chosen
    block = max(c.kept_bytes for c in glanced.chosen.on(0, 0).costs)

    def walked(more: tuple[float, float]) -> Found:
        def predicted(program: Any, plan: Any) -> Prediction:
            seen = predict(program, plan)
            return replace(
                seen,
                places=tuple(
                    replace(place, entries=(*place.entries, Entry("temporaries", "", "", more[place.number])))
                    for place in seen.places
                ),
            )

        monkeypatch.setattr(staging, "predict", predicted)
        return lay(*arguments, whole=True)

    plain, fuller = walked((0.0, 0.0)), walked((block * (full == 0), block * (full == 1)))
    assert max(fuller.places_bytes) <= pricing.context.limit_bytes
    assert (
        fuller.cuts.again[full] > plain.cuts.again[full] and fuller.cuts.again[1 - full] <= plain.cuts.again[1 - full]
    )


def test_alike_stages_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a run share one Cost. Of 12 stages with a block each, those at the ends have other pieces, too, and the
    last one sends nothing."""
    context = SearchContext(graph(12), {"b": 4096}, Request(Cluster.parse("h100:1x2"), Settings("train")))
    pricing = Pricing(context, replace(SEARCH, kinds=(Kind("interleaved_1f1b", 6),)))
    found = pricing.glance(SHAPE, math.inf)
    (costs,) = (pieces.costs for pieces in found.chosen.pieces)
    assert len({id(cost) for cost in costs}) == len({unit.name for unit in context.units}) < len(costs)
    timed: list[Any] = []

    def each(*args: Any, **more: Any) -> Any:
        timed.append(args)
        return stage_time(*args, **more)

    monkeypatch.setattr(stage_times, "stage_time", each)
    again = lay(context, SEARCH.name, SHAPE, found.table, found.ground, found.chosen, shifts=False)
    assert found.table.stages == 12 > 3 * len(timed) and again.step_s == found.step_s


def taken_apart(found: Found) -> set[bool]:
    """Whether the backwards of its stages with blocks can be taken apart, but for the first one's, which has no part
    for what was received."""
    return {view.separable for view in views(found.program, found.plan) if view.blocks and view.receives}


@pytest.mark.parametrize(
    ("cluster", "shape", "blocks"),
    [
        ("l4:2x4", Shape(2, (4,), 2), 8),
        ("l4:2x4", Shape(4, (2,), 2), 16),
        ("l4:2x4", Shape(2, (2, 2), 2), 8),
        ("h100:2x4", Shape(2, (4,), 4), 8),
        ("h100:2x4", Shape(4, (2,), 4), 8),
        ("h100:2x4", Shape(2, (2, 2), 2), 8),
    ],
    ids=str,
)
def test_zero_bubble_schedules_get_stages_that_can_be_taken_apart(
    cluster: str, shape: Shape, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On slow links weights are best gathered for each use, in the background, where few microbatches share what is
    gathered once per step. Stages that do so run their backward as one, and the schedule gains nothing."""
    monkeypatch.setattr(search_context, "SHAPE_SOLVE_S", 60.0)  # to the end, on a busy machine too
    request = Request(Cluster.parse(cluster), Settings("train"), time_limit_s=math.inf)
    context = SearchContext(graph(blocks), {"b": 4096}, request)
    pricing, wins = Pricing(context, SEARCH), []
    for table in pricing.tables(shape):
        if not table.schedule.splits_backward:
            continue
        all_there_are, separable = (
            pricing.price(shape, [table], "none", exact=True, models=models)
            for models in (pricing.models(shape), pricing.models(shape).separable)
        )
        assert taken_apart(separable) == {True}
        assert taken_apart(all_there_are) == {all_there_are.chosen.separable}
        assert pricing.price(shape, [table], "none", exact=True).step_s == min(all_there_are.step_s, separable.step_s)
        optimum = context.solve(pricing.models(shape), table, "none", exact=True, beside=False)
        found = [pricing.laid_exactly(shape, table, ground, optimum) for ground in context.grounds(shape)]
        assert all(taken_apart(each) == {optimum.separable} for each in found)
        wins.append(min(each.step_s for each in found) / separable.step_s)
        assert optimum.separable or wins[-1] > 1.1
    assert wins
    if cluster == "l4:2x4":
        assert max(wins) > 1.15
        exact = pricing.exact(pricing.glance(shape, math.inf))
        assert exact is not None and exact.chosen.separable


@pytest.mark.parametrize("memory_mib", [150, 210])
def test_a_glance_at_what_can_be_taken_apart_begins_at_the_choices_of_all(
    memory_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun from nothing it ends, with 210 MiB, at a solution that takes 1.4 times as long, if no linear program is
    solved, as of larger models. With 150 MiB the choices of all gather weights again."""
    monkeypatch.setattr(ilp, "FEW_CHOICES", 0)
    request = Request(Cluster.parse("l4:2x4"), Settings("train"), memory_bytes=memory_mib * 2**20)
    context = SearchContext(graph(8), {"b": 16384}, request)
    pricing, shape = Pricing(context, SEARCH), Shape(2, (4,), 4)
    table = next(table for table in pricing.tables(shape) if table.schedule.splits_backward)
    models = pricing.models(shape)
    start = context.solve(models, table, "none", exact=False, beside=False).solution.choice

    def time_s(*, exact: bool, start: tuple[int, ...] | None = None) -> float:
        chosen = context.solve(models.separable, table, "none", exact=exact, start=start, beside=False)
        return chosen.model.problem.price(chosen.solution.choice).time_s

    assert models.separable.micro.problem.price(start).feasible == (memory_mib == 210)
    assert time_s(exact=False, start=start) == pytest.approx(time_s(exact=True))
    assert (time_s(exact=False) > 1.4 * time_s(exact=True)) == (memory_mib == 210)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_sums_that_other_work_hides_are_looked_at_where_the_glance_avoids_them(microbatches: int) -> None:
    """Cut weights have no sums, and were all that was tried then; the sums of whole ones hide well enough in a pipeline
    of two microbatches to be 1.3 % faster, and of four under another timetable than that of the glance."""
    context = SearchContext(graph(4), {"b": 8192}, Request(Cluster.parse("a100-80:4x1"), Settings("train")))
    pricing, shape = Pricing(context, SEARCH), Shape(2, (2,), microbatches)
    exact = pricing.exact(pricing.glance(shape, math.inf))
    others = []
    for table in pricing.tables(shape):
        chosen = context.solve(pricing.models(shape), table, "none", exact=True)
        others += [pricing.laid_exactly(shape, table, ground, chosen) for ground in context.grounds(shape)]
    assert exact is not None and exact.step_s <= min(other.step_s for other in others) * (1 + 1e-4)


@pytest.mark.parametrize(
    ("cluster", "mesh", "batch", "microbatches", "gained"),
    [("l4:8x1", (4,), 2048, 4, 1.5), ("l4:2x4", (4,), 512, 4, 1.2)],
)
def test_layouts_whose_sums_do_not_hide_are_not_all_that_is_looked_at(
    cluster: str, mesh: tuple[int, ...], batch: int, microbatches: int, gained: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On slow links: other layouts have smaller sums."""

    def glance_s() -> float:
        request = Request(Cluster.parse(cluster), Settings("train"), time_limit_s=math.inf)
        pricing = Pricing(SearchContext(graph(8), {"b": batch}, request), SEARCH)
        return pricing.glance(Shape(2, mesh, microbatches), math.inf).step_s

    both_s = glance_s()
    monkeypatch.setattr(module, "SHOWN", math.inf)
    assert glance_s() > gained * both_s


def test_gradients_are_scattered_after_each_microbatch_where_that_saves_time() -> None:
    """The search scattered all of them once per step, and cut weights for good or gathered them at each use instead,
    which takes 1.26 times as long."""
    request = Request(Cluster.parse("l4:4x1"), Settings("train"), memory_bytes=210 * 2**20, time_limit_s=math.inf)
    context, shape = SearchContext(graph(8), {"b": 8192}, request), Shape(1, (4,), 4)
    pricing = Pricing(context, SEARCH)
    once = pricing.exact(pricing.glance(shape, math.inf))
    assert once is not None
    assert _cadences(once) == {"once"}
    each = scattered(pricing, once)
    assert each is not None
    assert "each" in _cadences(each)
    assert Prover(context).bound_s(shape) <= each.step_s < 0.8 * once.step_s


@pytest.mark.parametrize(("limit", "most_s"), [(205, 0.3), (230, 0.21)])
def test_more_memory_is_no_reason_to_find_less(limit: int, most_s: float) -> None:
    """What the Problem counts leaves out the bucket of gradients beside the last backward: what it took for fitting did
    not as it runs, where with a little less room another solution did; of 205 MiB none was found at all."""
    request = Request(Cluster.parse("l4:4x1"), Settings("train"), memory_bytes=limit * 2**20, time_limit_s=math.inf)
    context, shape = SearchContext(graph(8), {"b": 8192}, request), Shape(1, (4,), 4)
    pricing = Pricing(context, SEARCH)
    once = pricing.exact(pricing.glance(shape, math.inf))
    assert once is not None and once.filled <= 1
    found = scattered(pricing, once) or once
    assert found.step_s < most_s and found.filled <= 1


def _cadences(found: Found) -> set[str]:
    """When gradients are scattered."""
    return {"each" if EACH in node.runs else "once" for node in found.plan.nodes.values()}


@pytest.mark.parametrize("recipe", PIPELINES.values(), ids=lambda recipe: recipe.name)
def test_what_a_named_pipeline_may_do_the_search_may_do_too(recipe: PipelineRecipe) -> None:
    """No search scattered gradients after each microbatch, as `pp_zero2` does, and no proof was of plans that do."""
    here = SearchContext(graph(), {"b": 64}, Request(Cluster.parse("h100:1x4"), Settings("train"))).planner(4)
    (free,) = scattering(SEARCH.roles_on((2,)) or ())
    for role in recipe.roles:
        for theirs, ours in zip(here.joints(role, 2), here.joints(free, 2), strict=True):
            assert set(theirs) <= set(ours)


@pytest.mark.parametrize(("recipe", "microbatches"), [("naive_mp", 1), ("gpipe", 4), ("1f1b", 4)])
@pytest.mark.parametrize("alone", [1.0, 4.0])
def test_places_that_are_faster_while_others_wait_are_no_faster_than_their_floor(
    recipe: str, microbatches: int, alone: float
) -> None:
    """The floor counted the wait for other places in full, which cost nothing where these shared all cores."""
    base, shape = Cluster.parse("cpu:1x4"), Shape(4, (1,), microbatches)
    request = Request(replace(base, device=replace(base.device, alone=alone)), Settings("train"))
    pricing = Pricing(SearchContext(graph(4), {"b": 512}, request), of_recipe(PIPELINES[recipe]))
    step_s = pricing.price(shape, pricing.tables(shape), "none", exact=True).step_s
    assert 0.6 * step_s < pricing.floor_s(shape, "none") <= step_s
