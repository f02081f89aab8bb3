"""The walk through a space of shapes: which starts a probe visits, and which results are solved to the end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.joint import choice, explore, inside, walk_limits
from autopar.joint.explore import Explorer
from autopar.joint.shapes import Shape, like_parts
from autopar.joint.spaces import SEARCH
from tests.helpers.walks import result

INF = math.inf


class Starts(Explorer):
    """A walk whose starts take given seconds; infinite: nothing fits."""

    def __init__(self, steps_s: Sequence[float]) -> None:
        context = SimpleNamespace(timer=SimpleNamespace(halfway=INF, limit_s=100.0))
        super().__init__(context, SEARCH, INF, INF)  # type: ignore[arg-type]  # a stub
        self.steps_s = {Shape(2**number, (1,), 2**number): step_s for number, step_s in enumerate(steps_s)}
        self.pricing = SimpleNamespace(proven={})  # type: ignore[assignment]  # a stub

    def _shapes(self) -> list[Shape]:
        self.floors = dict.fromkeys(self.steps_s, 0.0)
        return [*self.steps_s]

    def _starts(self, shapes: list[Shape]) -> list[Shape]:
        return shapes

    def visit(self, shape: Shape, near: float) -> None:
        step_s = self.steps_s[shape]
        self.found[shape] = SimpleNamespace(step_s=step_s) if step_s < INF else None  # type: ignore[assignment]  # a stub


@pytest.mark.parametrize(
    ("steps_s", "visited"),
    [
        ([14.6, 18.7, 17.5, 17.3, 17.1, 17.0, 16.9], 5),  # far, and hardly faster each time
        ([14.6, 18.7, 19.0, 14.0], 3),  # far, and slower each time
        ([5.0, 12.0, 9.0, 7.0, 5.6, 4.5], 6),  # far, but soon near
        ([14.6, 15.0, 15.1, 15.2, 15.3], 5),  # all near
        ([14.6, 18.7, INF, INF, 18.7, 14.0], 6),  # what does not fit says nothing
        ([INF, INF, INF], 3),
    ],
)
def test_a_probe_leaves_out_what_hardly_gets_faster(steps_s: Sequence[float], visited: int) -> None:
    walk = Starts(steps_s)
    assert walk.probe(INF) == min(steps_s[:visited])
    assert len(walk.found) == visited


@pytest.mark.parametrize(("floor_s", "visited"), [(0.4, 1), (0.6, 0)])
def test_a_second_probe_leaves_out_what_cannot_be_near_its_floor(floor_s: float, visited: int) -> None:
    """Of one kind of pipelines the steps found are 2 and 3 times as long as their floors, the fastest 1 s."""
    first, second = Starts([1.0, 1.2]), Starts([0.9])
    floors = {first: [0.5, 0.4], second: [floor_s]}
    for walk, its in floors.items():
        walk._shapes = lambda walk=walk, its=its: _floored(walk, its)  # type: ignore[method-assign,misc]  # a stub
    assert choice._probed([first, second], INF) == (0.9 if visited else 1.0)
    assert len(second.found) == visited


def _floored(walk: Starts, floors_s: Sequence[float]) -> list[Shape]:
    """The shapes of a walk, with floors."""
    walk.floors = dict(zip(walk.steps_s, floors_s, strict=True))
    return [*walk.steps_s]


def test_the_bound_of_what_is_beaten_says_nothing_against_fewer_microbatches() -> None:
    """Of 16 microbatches only a bound is known; 8 take longer than that, and 4 are the fastest."""
    steps_s = {16: INF, 8: 8.7, 4: 6.2, 2: 6.5, 1: 1.0}
    shapes = [Shape(1, (2,), microbatches) for microbatches in sorted(steps_s)]
    walk = Starts([])

    def visit(shape: Shape, near: float) -> None:
        step_s = steps_s[shape.microbatches]
        walk.found[shape] = SimpleNamespace(step_s=step_s) if step_s < INF else None  # type: ignore[assignment]  # a stub

    walk.floors, walk.pricing.proven = dict.fromkeys(shapes, 0.0), {shapes[-1]: 7.0}  # type: ignore[misc]  # a stub
    walk.beaten[shapes[-1]] = 1.2, 5.4
    walk.visit = visit  # type: ignore[method-assign]  # a stub
    walk._slide(shapes[-1], shapes, walk_limits.NEAR)
    assert [shape.microbatches for shape in walk.found] == [16, 8, 4, 2]


@pytest.mark.parametrize(
    ("steps_s", "filled", "visited"),
    [
        ({16: 9.0, 8: 7.0, 4: 6.0, 2: 5.0}, {16: 0.3, 8: 0.5, 4: 0.8}, [16, 8, 4]),  # 2 would fill 1.4 of the memory
        ({16: 9.0, 8: 7.0, 4: 7.5, 2: 5.0}, {16: 0.25, 8: 0.3, 4: 0.4}, [16, 8, 4]),
        ({16: 9.0, 8: 7.0}, {16: 0.7}, [16]),
        ({16: INF, 8: 7.0}, {}, [16]),
    ],
)
def test_a_probe_goes_to_fewer_microbatches_while_there_is_room(
    steps_s: dict[int, float], filled: dict[int, float], visited: list[int]
) -> None:
    """Two tenths of the memory are for weights and their state."""
    walk = Starts([])
    walk.context.rest_bytes, walk.context.mean_bytes = 0.2 * 4 * 100.0, lambda places: 100.0  # type: ignore[misc,method-assign]  # a stub
    walk.context.request = SimpleNamespace(cluster=SimpleNamespace(devices=4))  # type: ignore[assignment]  # a stub
    walk.steps_s = {Shape(2, (2,), microbatches): step_s for microbatches, step_s in sorted(steps_s.items())}
    walk._starts = lambda shapes: shapes[-1:]  # type: ignore[method-assign]  # a stub

    def visit(shape: Shape, near: float) -> None:
        Starts.visit(walk, shape, near)
        if (found := walk.found[shape]) is not None:
            vars(found).update(shape=shape, filled=filled.get(shape.microbatches, 1.0))

    walk.visit = visit  # type: ignore[method-assign]  # a stub
    assert walk.probe(INF) == min(steps_s[microbatches] for microbatches in visited)
    assert [shape.microbatches for shape in walk.found] == visited


@pytest.mark.parametrize(
    ("steps_s", "solved", "left_s"),
    [
        ([10.9, 10.95, 11.2], [10.9, 10.95], INF),  # of these 11.2 is far behind what is known from elsewhere
        ([11.2, 11.3], [], INF),
        ([9.0, 9.2, 9.3], [9.0, 9.2], INF),  # 9.3 is not near the best
        ([10.5, 10.7], [10.5], 2 * inside.STAGE_S),  # cuts inside of blocks take the rest of the time
    ],
)
def test_what_is_far_behind_is_not_solved_to_the_end(
    steps_s: Sequence[float], solved: Sequence[float], left_s: float
) -> None:
    walk = Starts(steps_s)
    walk.known_s, walk.deadline = 10.0, time.monotonic() + left_s
    for shape in walk._shapes():
        walk.found[shape] = result(shape, walk.steps_s[shape], stages=4)
        walk.pricing.proven[shape] = 1.0
    best, found = walk.found[next(iter(walk.steps_s))], []
    while best is not None and (rough := walk._next_to_solve(best)) is not None:
        found.append(rough.step_s)
        walk.polished[rough.shape] = None
    assert found == solved


@pytest.mark.parametrize(("deadline", "honed"), [(-INF, 3.0), (INF, 2.0)])
def test_a_late_result_is_not_honed(deadline: float, honed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state alone takes seconds of a pipeline of many stages; the plan says that time was up."""
    monkeypatch.setattr(explore, "honed", lambda context, name, found, late: SimpleNamespace(step_s=2.0))
    monkeypatch.setattr(explore, "with_other_stages", lambda pricing, found, late: found)
    context: Any = SimpleNamespace(request=SimpleNamespace(say=lambda text: None))
    walk, shape = Explorer(context, SEARCH, INF, deadline), Shape(2, (1,), 2)
    walk.polished[shape] = None
    made = walk._honed(result(shape, 3.0))
    assert made is not None and made.step_s == honed and walk.hurried == (deadline < 0)


def test_a_cluster_of_parts_begins_where_places_are_as_large_as_can_be() -> None:
    """With the mesh of one axis and a sample for each rank, as a part alone has it."""
    shapes = [
        Shape(places, mesh, microbatches)
        for places, mesh in ((1, (16,)), (2, (8,)), (2, (2, 4)), (4, (4,)))
        for microbatches in (1, 2, 4, 8, 16)
    ]
    assert like_parts(shapes, 64) == [Shape(2, (8,), 8)]
    assert like_parts(shapes, 16) == [Shape(2, (8,), 2)] and like_parts(shapes, 1024) == [Shape(2, (8,), 8)]
    assert like_parts([Shape(1, (16,), 1)], 64) == []


@pytest.mark.parametrize(("far", "next_to"), [(False, [9.0, 9.4]), (True, [9.0, 9.4, 10.5])])
def test_neighbours_of_what_is_far_are_for_the_end(far: bool, next_to: Sequence[float]) -> None:
    """10.5 is 17 % behind the best."""
    walk = Starts([9.0, 9.4, 10.5, 11.0])
    walk.far = far
    for shape in walk._shapes():
        walk.found[shape] = result(shape, walk.steps_s[shape])
        walk.polished[shape] = None
    found = []
    while (shape := walk._promising()) is not None:
        found.append(walk.steps_s[shape])
        walk.expanded.add(shape)
    assert found == next_to


def test_a_result_is_refined_before_the_walk_goes_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of that is refined as well, and known from then on; the same result is not refined again."""
    done: list[str] = []
    shape, other = Shape(2, (1,), 2), Shape(4, (1,), 4)
    ends = {"near": result(shape, 3.0), "far": result(other, 2.5)}

    def run(walk: Any) -> Any:
        done.append(f"{'far' if walk.far else 'near'} {walk.known_s:g}")
        return ends["far" if walk.far else "near"]

    def refined(context: Any, found: Any, others: Any, known_s: float) -> Any:
        done.append(f"refined {found.step_s:g}")
        return SimpleNamespace(step_s=found.step_s - 0.1)

    monkeypatch.setattr(choice, "_refined", refined)
    context: Any = SimpleNamespace(timer=SimpleNamespace(late=False))
    walk = SimpleNamespace(far=False, known_s=4.0, fit={})
    walk.run = lambda: run(walk)
    made = choice._searched(context, walk, 4.0)  # type: ignore[arg-type]  # a stub
    assert made is not None and made.step_s == 2.4
    assert done == ["near 4", "refined 3", "far 2.9", "refined 2.5"]
    walk.far, ends["far"] = False, ends["near"]
    assert choice._searched(context, walk, 4.0) is not None and done[-1].startswith("far")  # type: ignore[arg-type]  # a stub
