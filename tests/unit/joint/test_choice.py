"""The walk against all there is: on small clusters every shape under every timetable, each solved to the end."""

from __future__ import annotations

import dataclasses
import math
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import explore, plan, walk_limits
from autopar.joint.background_proof import BackgroundProof
from autopar.joint.choice import _one_stage_is_best, _simpler_plan_note
from autopar.joint.effort import Effort
from autopar.joint.explore import Explorer
from autopar.joint.prove import Prover
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import Found
from autopar.onestage import plan as one_stage
from autopar.problem.remat import LEVELS
from autopar.problem.settings import Settings
from autopar.request import Request
from autopar.timer import Timer
from tests.helpers.planned import BATCH, graph
from tests.helpers.verify import by_recipe, subject
from tests.helpers.walks import result


class All(Explorer):
    """Visits everything and solves it exactly, under each timetable for itself."""

    def run(self) -> Found | None:
        """The best of all shapes."""
        prover = Prover(self.context)
        for shape in self.space.shapes(self.context):
            bound_s = prover.bound_s(shape, effort=Effort(3))
            for table in self.pricing.tables(shape):
                for level in LEVELS:
                    try:
                        here = self.pricing.price(shape, [table], level, exact=True)
                    except InfeasibleError:
                        continue
                    assert here.step_s >= self.pricing.floor_s(shape, "none"), (
                        f"{shape} is said not to be faster than it is"
                    )
                    assert here.step_s >= bound_s * (1 - 1e-9), f"{shape} is proven not to be faster than it is"
                    before = self.found.get(shape)
                    self.found[shape] = here if before is None or here.step_s < before.step_s else before
        return min((f for f in self.found.values() if f is not None), key=lambda f: f.step_s, default=None)


@pytest.mark.parametrize(
    ("cluster", "room"),
    [
        ("l4:1x2", 1.3e-4),
        *(
            pytest.param(name, room, marks=pytest.mark.slow)
            for name, room in (("l4:1x4", 1.3e-4), ("cpu:1x4", 1.0), ("h100:2x2", 1.0), ("h100:2x4", 1.0))
        ),
    ],
)
def test_the_walk_finds_what_there_is(cluster: str, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Cluster.parse(cluster)
    device = dataclasses.replace(where.device, memory_bytes=int(where.device.memory_bytes * room))
    who = subject("hf-gpt2")
    request = Request(Cluster(where.name, where.levels, device), Settings("train"))
    monkeypatch.setattr(walk_limits, "FEW_SHAPES", 4)  # so that it walks
    context = SearchContext(who.captured.gm, {**who.captured.hints, "b": 8}, request)
    walked = Explorer(context, SEARCH, math.inf, time.monotonic() + 600, quick_s=BackgroundProof(context).quick_s).run()
    best = All(context, SEARCH, math.inf, time.monotonic() + 600).run()
    assert (walked is None) == (best is None)
    assert best is None or walked is None or walked.step_s <= best.step_s * (1 + 2 * PRICE_TOLERANCE)


@pytest.mark.parametrize(
    ("polished_s", "open_again"), [({"slow": 1.15}, False), ({"fast": 1.02}, False), ({"fast": 1.2}, True)]
)
def test_what_was_beaten_is_only_looked_at_again_where_the_fastest_has_become_slower(
    polished_s: dict[str, float], *, open_again: bool
) -> None:
    """A shape of which 1.1 is proven, where what takes more than 1.05 times the fastest step, 1.0, was not looked at
    further."""
    context: Any = SimpleNamespace(request=SimpleNamespace(say=lambda text: None))
    shapes = {"fast": Shape(1, (8,), 2), "slow": Shape(2, (4,), 2), "beaten": Shape(4, (2,), 4)}
    walk = Explorer(context, SEARCH, math.inf, math.inf)
    proven = {shapes["beaten"]: 1.1}
    found: Any = {
        shapes[name]: SimpleNamespace(shape=shapes[name], step_s=step_s)
        for name, step_s in (("fast", 1.0), ("slow", 1.1))
    }
    walk.found = {**found, shapes["beaten"]: None}
    walk.beaten = {shapes["beaten"]: (walk_limits.NEARER, 1.0)}
    ((name, step_s),) = polished_s.items()
    vars(walk)["pricing"] = SimpleNamespace(
        proven=proven, exact=lambda before: SimpleNamespace(shape=before.shape, step_s=step_s)
    )
    walk._polish(found[shapes[name]])
    assert (shapes["beaten"] not in walk.found) == (shapes["beaten"] not in walk.beaten) == open_again


@pytest.mark.parametrize(("step_s", "said"), [(1.0, True), (0.9, False)])
def test_it_is_said_where_a_pipeline_is_faster_by_less_than_prices_tell(step_s: float, *, said: bool) -> None:
    made = by_recipe(subject("hf-gpt2"), (2,), "ddp")
    made = dataclasses.replace(made, predicted=dataclasses.replace(made.predicted, step_s=step_s))
    walk: Any = SimpleNamespace(
        settled=[
            SimpleNamespace(step_s=slower_s, plan=dataclasses.replace(made, microbatches=4))
            for slower_s in (0.995, 0.998)
        ]
    )
    notes = list(_simpler_plan_note(made, [walk, cast("Any", SimpleNamespace(settled=[]))]))
    assert notes == (
        ["2 (1 s) rather than 2, 4 microbatches (995 ms): prices do not tell 0.50 % apart"] if said else []
    )
    assert not list(_simpler_plan_note(made, []))


@pytest.mark.parametrize(("held", "where"), [("", ""), ("optimizer", " with optimizer on the host")])
def test_what_is_proven_of_plans_on_the_host_is_not_said_of_all(held: str, where: str) -> None:
    flat = by_recipe(subject("hf-gpt2"), (2,), "ddp")
    flat = dataclasses.replace(flat, predicted=dataclasses.replace(flat.predicted, step_s=2.0, bound_s=1.5))
    made = _one_stage_is_best(flat, [], 1.0, held)
    assert made.predicted.bound_s == 1.0 and made.notes == (
        *flat.notes,
        f"of plans of one stage and one microbatch{where} none is faster than 1.5 s by the linear prices of their "
        "Problem",
    )
    assert _one_stage_is_best(flat, [], 1.5, held).notes == flat.notes


@pytest.mark.parametrize(
    ("known_s", "chosen"), [(math.inf, "simple"), (1.1, "simple"), (1.0, "fast"), (0.985, "simple"), (0.9, "simple")]
)
def test_what_is_simpler_is_only_taken_where_it_beats_what_is_known_as_the_fastest_does(
    known_s: float, chosen: str
) -> None:
    """The fastest takes 0.981 and a simpler one 0.99, which prices tell from 1.1 and not from 1.0."""
    context: Any = SimpleNamespace()
    walk, steps_s = Explorer(context, SEARCH, known_s, math.inf), {"simple": (1, 0.99), "fast": (2, 0.981)}
    found: Any = {
        Shape(places, (2,), 4): SimpleNamespace(
            name=name, step_s=step_s, table=SimpleNamespace(places=places, stages=places, microbatches=4)
        )
        for name, (places, step_s) in steps_s.items()
    }
    walk.found = found
    best: Any = walk.best
    assert best.name == chosen


@pytest.mark.parametrize(("proven_s", "solved"), [(0.8, ["near"]), (0.995, [])])
def test_what_is_near_the_best_is_solved_where_only_that_may_be_faster_than_what_others_have(
    proven_s: float, solved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have 1.0. Of the best shape, 1.0 at a glance, 0.995 is proven, so that it gains nothing; a near one is 0.9
    when it is solved."""
    context: Any = SimpleNamespace(request=SimpleNamespace(say=lambda text: None), timer=Timer(math.inf))
    shapes = {"best": Shape(1, (8,), 2), "near": Shape(2, (4,), 2)}
    walk, said = Explorer(context, SEARCH, 1.0, math.inf), list[str]()
    found: Any = {
        shapes[name]: SimpleNamespace(
            shape=shapes[name],
            step_s=step_s,
            table=SimpleNamespace(places=shapes[name].places, stages=1, microbatches=2),
        )
        for name, step_s in (("best", 1.0), ("near", 1.03))
    }

    def exact(before: Any) -> Any:
        said.append(next(name for name, shape in shapes.items() if shape == before.shape))
        return SimpleNamespace(shape=before.shape, step_s=0.9, table=before.table)

    vars(walk)["pricing"] = SimpleNamespace(proven={shapes["best"]: 0.995, shapes["near"]: proven_s}, exact=exact)
    monkeypatch.setattr(walk, "_shapes", list)
    monkeypatch.setattr(walk, "_walk", lambda shapes: walk.found.update(found) if not walk.found else None)
    monkeypatch.setattr(explore, "honed", lambda context, name, best, late: best)
    monkeypatch.setattr(explore, "with_other_stages", lambda pricing, found, late: found)
    monkeypatch.setattr(explore, "scattered", lambda pricing, found: None)
    made = walk.run()
    assert said == solved and made is not None and made.step_s == (0.9 if solved else 1.0)


def test_gradients_are_scattered_more_often_in_the_two_fastest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four solved shapes of 1.0 to 1.3 s the second one gets to 0.6 s so."""
    tried: list[int] = []
    shapes = [Shape(1, (8 << index,), 2) for index in range(4)]
    context: Any = SimpleNamespace(timer=Timer(math.inf))
    walk = Explorer(context, SEARCH, math.inf, math.inf)
    found: Any = {
        shape: SimpleNamespace(
            shape=shape, step_s=1 + index / 10, table=SimpleNamespace(places=1, stages=1, microbatches=2)
        )
        for index, shape in enumerate(shapes)
    }
    walk.found, walk.polished = found, dict.fromkeys(shapes)
    vars(walk)["pricing"] = None

    def scattered(pricing: None, before: Any) -> Any:
        tried.append(shapes.index(before.shape))
        return SimpleNamespace(**{**vars(before), "step_s": 0.6}) if tried[-1] else None

    monkeypatch.setattr(explore, "scattered", scattered)
    walk._scatter()
    best = walk.best
    assert tried == [0, 1] and best is not None and best.step_s == 0.6


@pytest.mark.parametrize(
    ("steps_s", "visited"),
    [
        ((1.0, 1.3, 1.5, 1.7, 1.9, 2.1), [1, 2, 4]),
        ((1.0, 1.3, 1.2, 1.4, 1.6, 0.5), [1, 2, 4, 8, 16]),  # the third is faster than the second
        ((1.0, 1.05, 1.08, 1.09, 1.5, 1.4), [1, 2, 4, 8, 16, 32]),  # near the best, which is no reason to end
        ((2.0, 1.5, 1.2, 1.0, 1.1, 1.05), [1, 2, 4, 8, 16, 32]),
    ],
)
def test_more_places_are_not_begun_with_where_steps_get_longer_and_longer(
    steps_s: tuple[float, ...], visited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1, 2, ... 32 places on 32 devices, by the seconds that each takes."""
    shapes = [Shape(2**n, (2 ** (5 - n),), 32) for n in range(6)]
    took_s = dict(zip(shapes, steps_s, strict=True))
    context: Any = SimpleNamespace(
        request=SimpleNamespace(say=lambda text: None, cluster=SimpleNamespace(levels=[SimpleNamespace(size=8)])),
        batch=32,
        timer=Timer(math.inf),
    )
    walk = Explorer(context, SEARCH, math.inf, math.inf)
    walk.floors = dict.fromkeys(shapes, 0.1)
    vars(walk)["pricing"] = SimpleNamespace(proven={}, glance=lambda shape, *bounds_s: result(shape, took_s[shape]))
    monkeypatch.setattr(walk_limits, "FEW_SHAPES", 4)
    monkeypatch.setattr(explore, "neighbours", lambda shape, among: [])
    walk._walk(shapes)
    assert [shape.places for shape in walk.found] == visited


def test_neighbours_of_the_best_are_visited_between_starts() -> None:
    """Of one place there is a mesh beside the one that is begun with: it is visited before two places are."""
    shapes = [Shape(1, (4, 8), 4), Shape(1, (8, 4), 4), *(Shape(2**n, (2 ** (5 - n),), 32) for n in range(1, 6))]
    context: Any = SimpleNamespace(
        request=SimpleNamespace(say=lambda text: None, cluster=SimpleNamespace(levels=[SimpleNamespace(size=8)])),
        batch=32,
        timer=Timer(math.inf),
    )
    walk = Explorer(context, SEARCH, math.inf, math.inf)
    walk.floors = dict.fromkeys(shapes, 0.1)
    vars(walk)["pricing"] = SimpleNamespace(
        proven={}, glance=lambda shape, *bounds_s: result(shape, 1.0 + 0.001 * shape.places)
    )
    walk.wider = {Shape(64, (1,), 64): 1.0}  # a walk inside of another one begins with starts, however few there are
    walk._walk(shapes)
    assert [*walk.found][:3] == [Shape(1, (4, 8), 4), Shape(1, (8, 4), 4), Shape(2, (16,), 32)]


def test_the_first_neighbour_that_is_faster_is_gone_on_with() -> None:
    """A line of meshes of one place, each faster than the one before it, and slower shapes of two places beside."""
    line = [Shape(1, mesh, 4) for mesh in ((32,), (2, 16), (4, 8), (8, 4))]
    beside = [Shape(2, mesh, 4) for mesh in ((16,), (2, 8), (4, 4))]
    took_s = {**{shape: 1.0 - 0.1 * at for at, shape in enumerate(line)}, **dict.fromkeys(beside, 1.1)}
    context: Any = SimpleNamespace(request=SimpleNamespace(say=lambda text: None), timer=Timer(math.inf))
    walk = Explorer(context, SEARCH, math.inf, math.inf)
    walk.floors = dict.fromkeys(took_s, 0.1)
    vars(walk)["pricing"] = SimpleNamespace(proven={}, glance=lambda shape, *bounds_s: result(shape, took_s[shape]))
    walk.visit(line[0], walk_limits.NEAR)
    walk._climb([*took_s])
    assert [*walk.found][:4] == line and len(walk.found) > 4
    assert walk.expanded == {line[-1]}


@pytest.mark.parametrize(
    ("known_s", "held", "floor_s", "looked", "visited"),
    [
        (math.inf, 0.5, 0.5, [1, 2, 4], {1, 4}),  # there is nothing to compare a bound with before the first visit
        (1.0, 0.5, 0.5, [1, 2, 4], {1, 4}),  # two places are proven to take 1.2 s
        (1.0, 1.5, 0.5, [], {1, 2, 4}),  # a bound that ignores memory proves little where blocks must run again
        (1.0, 0.5, 0.3, [], {1, 2, 4}),  # nor does one of which the floor is far below
    ],
)
def test_shapes_that_a_quick_look_proves_to_be_slower_are_not_visited(
    known_s: float, held: float, floor_s: float, looked: list[int], visited: set[int]
) -> None:
    """Each number of places with 8 and 16 microbatches, which are looked at together."""
    shapes = [Shape(places, (8 // places,), m) for places in (1, 2, 4) for m in (8, 16)]
    context: Any = SimpleNamespace(
        request=SimpleNamespace(
            say=lambda text: None,
            cluster=SimpleNamespace(
                levels=[SimpleNamespace(size=8, protocols=())], device=SimpleNamespace(cache_bytes=0)
            ),
        ),
        batch=16,
        held_bytes=lambda shape, level: held,
        mean_bytes=lambda places: 1.0,
    )
    looks = list[int]()

    def quick_s(family: tuple[Shape, ...], cutoff_s: float) -> float:
        assert cutoff_s == 1.0 and family == tuple(shape for shape in shapes if shape.places == family[0].places)
        looks.append(family[0].places)
        return 1.2 if looks[-1] == 2 else 0.9

    walk = Explorer(context, SEARCH, known_s, math.inf, quick_s=quick_s)
    walk.floors = dict.fromkeys(shapes, floor_s)
    vars(walk)["pricing"] = SimpleNamespace(
        proven={}, levels=("none",), glance=lambda shape, *bounds_s: SimpleNamespace(shape=shape, step_s=1.0)
    )
    for shape in shapes:
        walk.visit(shape, walk_limits.NEAR)
    assert looks == looked and {shape.places for shape in walk.found} == visited
    assert len(walk.found) == 2 * len(visited)
    assert {shape.places for shape, floor_s in walk.proven.items() if floor_s == 1.2} == ({2} if looked else set())


def test_inference_that_fits_no_plan_of_one_stage_gets_a_pipeline_or_microbatches() -> None:
    """It was refused, though recipes of pipelines fit. Its bound is the least work."""
    request = Request(Cluster.parse("h100:1x2"), Settings("inference"), memory_bytes=200e6)
    hints, model = {"b": 16 * BATCH}, {"model": "stack", "graph_hash": "0" * 64}
    with pytest.raises(InfeasibleError):
        one_stage(graph(), hints, request, **model)
    made = plan(graph(), hints, request, **model)
    named = plan(graph(), hints, dataclasses.replace(request, recipe="gpipe"), **model)
    assert made.pipelined and made.predicted.memory_bytes <= 200e6
    assert 0 < made.predicted.bound_s <= made.predicted.step_s <= named.predicted.step_s * (1 + 1e-9)
