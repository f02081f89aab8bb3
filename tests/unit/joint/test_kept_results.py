"""What blocks that are run again keep in pipelines and with several microbatches: anything that memory has room for,
and what it is is what the plan says."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint.kept_results import Fuller
from autopar.joint.own_layouts import each_apart
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Timed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import Found, lay
from autopar.memory import predict
from autopar.problem.settings import Settings
from autopar.request import Request
from autopar.timer import Timer
from tests.helpers.verify import subject

SHAPES = [Shape(1, (2,), 4), Shape(2, (1,), 4), pytest.param(Shape(2, (2,), 8), marks=pytest.mark.slow)]


@cache
def roomy(shape: Shape) -> tuple[SearchContext, float]:
    """A small GPT-2 with all the memory there is, and what the fastest plan of a shape takes of it."""
    who = subject("hf-gpt2")
    request = replace(
        Request(Cluster.parse(f"h100:1x{shape.places * math.prod(shape.mesh)}"), Settings("train")),
        memory_bytes=float("inf"),
        time_limit_s=math.inf,
    )
    context = SearchContext(who.captured.gm, {**who.captured.hints, "b": 256}, request)
    pricing = Pricing(context, SEARCH)
    return context, pricing.price(shape, pricing.tables(shape), "none", exact=True).memory_bytes


def short(shape: Shape, share: float) -> Pricing:
    """Prices with that share of the memory."""
    context, most_bytes = roomy(shape)
    return Pricing(context.limited(share * most_bytes), SEARCH)


def corners(pricing: Pricing, found: Found) -> list[Found]:
    """Everything that may be kept under the choices of `found`, laid out under every timetable, where it fits."""
    opened, made = Fuller.of(found.chosen, pricing.context.whole), list[Found]()
    for scope in opened.nothing:
        for chosen in opened.ways(scope, opened.nothing):
            for table in pricing.tables(found.shape):
                with suppress(InfeasibleError):
                    made.append(lay(pricing.context, "search", found.shape, table, found.ground, chosen, whole=True))
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_kept_nothing_is_faster_than_is_proven(shape: Shape) -> None:
    seen = set()
    for share in (0.85, 0.75):
        pricing = short(shape, share)
        bound_s = Timed(pricing.context, pricing, shape).bound_s(math.inf)
        for found in corners(pricing, pricing.glance(shape, math.inf)):
            assert found.step_s >= bound_s * (1 - 1e-9)
            seen.add((found.table.kind, *found.plan.remat.items()))
    assert len(seen) > 3


class Levels(Pricing):
    """With just what levels say kept."""

    def _runs_again(self, found: Found) -> bool:
        return False


@pytest.mark.parametrize(("shape", "shares"), [(SHAPES[0], (0.9, 0.65)), (SHAPES[1], (0.9, 0.4))])
def test_a_shape_short_of_memory_keeps_what_makes_it_fastest(shape: Shape, shares: tuple[float, ...]) -> None:
    """A glance is no slower than with what levels say, and for some room it is faster; what comes of it as it runs fits
    and is no slower. (Of two places the fastest is DualPipeV; with half of its room others need not run again.)"""
    gained = []
    for share in shares:
        pricing = short(shape, share)
        plain = Levels(pricing.context, SEARCH)
        best, level = (each.glance(shape, math.inf) for each in (pricing, plain))
        gained.append(level.step_s / best.step_s - 1)
        assert best.plan.remat in (
            {},
            {scope: tuple(names) for scope, names in best.chosen.levels(pricing.context.whole).items()},
        )
        whole, other = pricing.exact(best), plain.exact(level)
        assert whole is None or max(whole.places_bytes) <= pricing.context.limit_bytes
        assert other is None or (whole is not None and whole.step_s <= other.step_s * 1.01)
    assert min(gained) >= 0 and max(gained) > 0.005


def test_once_time_is_up_what_fits_is_not_tried_with_other_results_kept() -> None:
    pricing = short(SHAPES[0], 0.65)
    best = pricing.glance(SHAPES[0], math.inf)
    assert pricing._runs_again(best)
    for late in (False, True):
        pricing.context.timer = Timer(0.0 if late else math.inf)
        assert any(pricing._kept_otherwise(best, None)), "nothing is known that fits"
        assert any(pricing._kept_otherwise(best, best)) != late and pricing.context.timer.hurried == late


def test_what_is_slower_with_all_the_memory_than_what_is_known_keeps_what_a_level_says() -> None:
    """It cannot become the fastest plan, whatever blocks keep."""
    shape = SHAPES[0]
    context, _ = roomy(shape)
    least_s = Pricing(context, SEARCH).glance(shape, math.inf).step_s
    pricing = short(shape, 0.65)
    level = Levels(pricing.context, SEARCH).glance(shape, math.inf)
    best = pricing.glance(shape, math.inf)
    with_room_s = pricing._roomy_s(level)
    near, far = (pricing.glance(shape, math.inf, known_s) for known_s in (1.01 * with_room_s, 0.99 * with_room_s))
    assert least_s <= with_room_s < best.step_s < level.step_s
    assert (near.step_s, far.step_s) == (best.step_s, level.step_s)


def test_each_place_keeps_what_its_own_memory_has_room_for() -> None:
    """The first place of 1F1B has more microbatches than the last one: with as much memory it runs more again, or keeps
    less."""
    shape = Shape(2, (1,), 4)
    pricing = short(shape, 0.7)
    tables = [table for table in pricing.tables(shape) if table.kind.schedule == "1f1b"]
    found = pricing.price(shape, tables, "full", exact=True)
    apart = each_apart(pricing.context, found)
    assert apart.step_s <= found.step_s and max(apart.places_bytes) <= pricing.context.limit_bytes
    program = pricing.context.program_of(apart.plan)
    assert predict(program, apart.plan).peak_bytes == pytest.approx(max(apart.places_bytes))
    assert set(apart.plan.remat) <= set(program.runs)
