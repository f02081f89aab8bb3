"""Two kinds of devices: faster places do more, smaller ones hold less, all at once they are as slow as the slowest; and
the search finds what there is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from autopar import joint, onestage
from autopar.bestfirst import PRICE_TOLERANCE
from autopar.cluster import Cluster
from autopar.cluster.mixed import join
from autopar.errors import InfeasibleError
from autopar.joint import one_part, staging, walk_limits
from autopar.joint.explore import Explorer
from autopar.joint.place_kinds import Weights
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Mixed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH, of_recipe
from autopar.memory import predict
from autopar.pipeline.filling import Cuts
from autopar.plan import Plan
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.problem.time_floor import least_wait
from autopar.recipes import roles
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from tests.helpers.kinds import slower, two_kinds
from tests.helpers.planned import BATCH, graph
from tests.helpers.verify import subject
from tests.unit.joint.test_choice import All


def _planned(cluster: Cluster, recipe: str | None, mesh: tuple[int, ...] | None = None) -> Plan:
    return joint.plan(
        graph(),
        {"b": BATCH},
        Request(cluster, recipe=recipe, mesh=mesh, time_limit_s=20.0),
        model="stack",
        graph_hash="0" * 64,
    )


def _blocks(made: Plan) -> list[int]:
    """How many blocks each place has."""
    return [
        sum(stop - first for stage in made.stages if stage.place == place for first, stop in stage.blocks.values())
        for place in range(made.places)
    ]


@pytest.mark.parametrize(
    "recipe", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("interleaved", "zero_bubble"))]
)
def test_the_faster_device_has_more_blocks(recipe: str) -> None:
    """On both orders of the parts: the one that is asked for first does not matter."""
    cluster = two_kinds("cpu:1x2", 2.0)
    made, turned = _planned(cluster, recipe), _planned(join(cluster.parts[::-1]), recipe)
    assert made.predicted.step_s == pytest.approx(turned.predicted.step_s)
    at = Cluster.from_dict(dict(made.cluster)).places(made.places, made.mesh)
    each: dict[str, int] = {}
    for place, blocks in enumerate(_blocks(made)):
        each[at.device(place).name] = each.get(at.device(place).name, 0) + blocks
    assert each["CPU core"] > each["slow"]
    assert Plan.from_json(made.to_json()) == made
    parts = [part.label for part in at.cluster.parts]
    notes = [note for note in (*made.notes, *turned.notes) if "number the ranks in this order" in note]
    assert notes == [f"number the ranks in this order: {', then '.join(parts)}; the first stages are on the first ones"]


def test_uneven_stages_are_faster_than_even_ones() -> None:
    """Than the same pipeline on four of the slow devices by more than their half, because the fast ones are not held
    up."""
    slow = slower(Cluster.parse("cpu:1x4"), 2.0)
    mixed, alone, fast = (
        _planned(c, "1f1b").predicted.step_s for c in (two_kinds("cpu:1x2", 2.0), slow, Cluster.parse("cpu:1x4"))
    )
    assert fast < mixed < 0.9 * alone


def test_a_place_with_less_memory_holds_less() -> None:
    """Alike in speed: what fits evenly is even; with a part that has half of what its place took then, that one takes
    no more than it has."""
    base = Cluster.parse("cpu:1x2")
    even = _planned(two_kinds("cpu:1x2", 1.0), "1f1b", (2,))
    small = 0.6 * min(even.predicted.places_bytes) / base.device.usable_memory_bytes
    made = _planned(two_kinds("cpu:1x2", 1.0, memory=small), "1f1b", (2,))
    at = Cluster.from_dict(dict(made.cluster)).places(made.places, made.mesh)
    limits = [at.device(place).usable_memory_bytes for place in range(made.places)]
    found = predict(read(graph(), made.hints, training=True, device="cpu"), made)
    assert [place.peak_bytes for place in found.places] == pytest.approx(list(made.predicted.places_bytes))
    assert all(nbytes <= limit for nbytes, limit in zip(made.predicted.places_bytes, limits, strict=True))
    assert max(made.predicted.places_bytes) > min(limits), "the other place holds what does not fit there"
    assert made.predicted.step_s > even.predicted.step_s
    with pytest.raises(InfeasibleError):
        _planned(join([slower(base, 1.0, small / 2), slower(base, 1.1, small / 2)]), "1f1b", (2,))


@pytest.mark.parametrize("recipe", ["ddp", "tp", "zero3"])
def test_all_at_once_is_as_slow_as_the_slowest(recipe: str) -> None:
    """One stage on both kinds takes what it takes on the slow ones alone."""
    cluster = two_kinds("cpu:1x2", 3.0)
    slow = dataclasses.replace(cluster.parts[1], levels=cluster.levels)
    steps = [onestage.plan(graph(), {"b": BATCH}, Request(c, recipe=recipe)).predicted.step_s for c in (cluster, slow)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)


def test_a_small_device_limits_one_stage() -> None:
    cluster = two_kinds("cpu:1x2", 1.0, memory=0.002)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        onestage.plan(graph(), {"b": BATCH}, Request(cluster, recipe="ddp"))


@pytest.mark.parametrize(("times", "memory"), [(2.0, 1.0), (3.0, 3e-4)])
@pytest.mark.slow
def test_the_walk_finds_what_there_is(times: float, memory: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/unit/joint/test_choice.py has it, of all shapes, timetables and orders of the parts."""
    monkeypatch.setattr(walk_limits, "FEW_SHAPES", 4)
    who = subject("hf-gpt2")
    context = SearchContext(
        who.captured.gm, {**who.captured.hints, "b": 8}, Request(two_kinds("cpu:1x2", times, memory), Settings("train"))
    )
    walked = Explorer(context, SEARCH, math.inf, time.monotonic() + 600).run()
    best = All(context, SEARCH, math.inf, time.monotonic() + 600).run()
    assert walked is not None and best is not None
    assert walked.step_s <= best.step_s * (1 + 2 * PRICE_TOLERANCE)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_no_cut_and_no_order_is_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all places where the stack can be cut for two places, and both orders."""
    context = SearchContext(graph(6), {"b": BATCH}, Request(two_kinds("cpu:1x2", 2.0), recipe=name))
    shape, walk = Shape(2, (2,), 16), Explorer(context, of_recipe(PIPELINES[name]), math.inf, time.monotonic() + 60)
    (table,) = walk.pricing.tables(shape)
    chosen = context.solve(context.models(shape, (roles.data,)), table, "none", exact=True)
    assert isinstance(chosen.models, Mixed) and len(chosen.pieces) == 2
    grounds = context.grounds(shape)
    assert [ground.kinds for ground in grounds] == [(0, 1), (1, 0)]
    found = min(staging.lay(context, name, shape, table, ground, chosen).step_s for ground in grounds)
    every: list[float] = []
    for bound, ground in itertools.product(range(1, context.pieces), grounds):
        monkeypatch.setattr(staging, "balance", lambda *_, bound=bound, **__: Cuts([bound], [0, 0]))
        try:
            every.append(staging.lay(context, name, shape, table, ground, chosen).step_s)
        except InfeasibleError:
            continue
    assert len(every) > 8 and found == pytest.approx(min(every), rel=1e-9)


def test_what_places_weigh() -> None:
    """Two places of pace 3 and one of pace 1: shares 3/7 and 1/7; where each takes 1 / pace, the mean weighs to the
    balanced time on three."""
    weights = Weights.of((2, 1), (3.0, 1.0))
    assert weights.places == 3 and weights.shares == pytest.approx((3 / 7, 1 / 7))
    assert 3 * sum(
        n * share**2 / pace for n, share, pace in zip((2, 1), weights.shares, (3.0, 1.0), strict=True)
    ) == pytest.approx(3 / 7)
    assert weights.even(2.0, 8) == 1.0 and weights.even(2.0, 4) == pytest.approx(4 / 3 / 2)


@pytest.mark.parametrize("paces", [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0, 3.0), (1.0, 0.2, 5.0, 2.0)])
@pytest.mark.parametrize("microbatches", [2, 4, 16])
def test_no_way_to_deal_work_waits_less(paces: Sequence[float], microbatches: int) -> None:
    """Against a fine grid of shares of the work: of the longest of m t_q + sum of t_p before q."""
    least, steps = math.inf, 24
    for cuts in itertools.combinations_with_replacement(range(steps + 1), len(paces) - 1):
        shares = [(b - a) / steps for a, b in itertools.pairwise((0, *cuts, steps))]
        times = [share / pace for share, pace in zip(shares, paces, strict=True)]
        least = min(least, max(microbatches * t + sum(times[:q]) for q, t in enumerate(times)))
    bound = least_wait(paces, microbatches) * microbatches / sum(paces)
    assert bound <= least * (1 + 1e-9) and bound > 0.8 * least


def test_more_of_the_same_is_one_kind() -> None:
    """Unequal nodes: both parts have the same device and the same price."""
    made = _planned(Cluster.parse("cpu:1x2+cpu:2x1"), "1f1b")
    assert made.ranks == 4 and json.loads(made.to_json())["cluster"]["parts"][1]["name"] == "cpu"


@pytest.mark.parametrize("part", ["cpu:1x1", pytest.param("cpu:1x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("times", "better"), [(100.0, True), pytest.param(1.2, False, marks=pytest.mark.slow)])
def test_a_part_that_is_in_the_way_is_named(
    part: str, times: float, better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a percent in the way is enough here."""
    monkeypatch.setattr(one_part, "PRICE_TOLERANCE", 0.001)
    made = _planned(two_kinds(part, times), None)
    notes = [note for note in made.notes if "alone is faster" in note]
    assert len(notes) == better and all(note.startswith(f"{part} alone is faster") for note in notes)
    alone = [other for other in made.alternatives if other.name == f"{part} alone"]
    if better:
        assert alone[0].step_s == pytest.approx(
            _planned(Cluster.parse(part), None).predicted.step_s, rel=PRICE_TOLERANCE
        )


def test_it_begins_with_what_is_like_a_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lockstep the faster part is as slow as the other one, and looking at that takes most of a short limit."""
    events, visit, one_stage = list[Any](), Explorer.visit, onestage.plan_with

    def visited(walk: Explorer, shape: Shape, near: float) -> None:
        visit(walk, shape, near)
        events.append((shape, walk.found.get(shape)))

    def at_once(*given: Any, **named: Any) -> Plan:
        events.append("one stage")
        return one_stage(*given, **named)

    monkeypatch.setattr(Explorer, "visit", visited)
    monkeypatch.setattr(onestage, "plan_with", at_once)
    _planned(two_kinds("cpu:1x2", 4.0), None)
    (shape, found), then, *_ = events
    alone = _planned(Cluster.parse("cpu:1x2"), None)
    assert (shape.places, shape.mesh, then) == (2, (2,), "one stage") and found.step_s < 1.5 * alone.predicted.step_s
