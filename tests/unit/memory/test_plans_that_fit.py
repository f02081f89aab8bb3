"""What the search accepts fits: a Problem's own count of bytes is checked by the walk over the emitted program."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from autopar.candidate import Candidate
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.memory import predict
from autopar.memory.plans_that_fit import within
from autopar.onestage import plan
from autopar.planner import Planner
from autopar.recipes import RECIPES
from autopar.recipes.free import space
from autopar.report.explain import choice_of
from autopar.request import Request
from autopar.search import ilp
from tests.helpers.planned import graph
from tests.helpers.verify import by_recipe, subject

CASES = [
    (name, recipe)
    for name in ("gpt", "hf-gpt2", "mlp", "cnn", "moe", "recommender")
    for recipe in ("ddp", "zero1", "zero3", "megatron")
]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_the_two_counts_are_within_a_factor_of_two(name: str, recipe: str) -> None:
    """What lives for a moment is at most as much again as what the Problem counts; and what it counts is not all there
    at once."""
    who, made = subject(name), by_recipe(subject(name), (2,), recipe)
    planner = Planner.of(who.captured.gm, who.captured.hints, Request(Cluster.parse("cpu:1x2"), mesh=(2,)))
    model = planner.model((2,), RECIPES[recipe].roles, recipe)
    counted = model.problem.price(choice_of(model, made)).memory_bytes
    peak = predict(planner.program, made).peak_bytes
    assert made.predicted.memory_bytes == peak
    assert counted / 2 <= peak <= 2 * counted


@pytest.mark.parametrize("room", [*(pytest.param(room, marks=pytest.mark.slow) for room in (0.6, 0.8)), 0.95])
def test_plans_fit_by_both_counts(room: float) -> None:
    """On devices with less memory than the fastest plan takes."""
    who, cluster = subject("gpt"), Cluster.parse("cpu:1x4")
    free = plan(
        who.captured.gm,
        who.captured.hints,
        Request(cluster, time_limit_s=5.0),
        model="gpt",
        graph_hash=who.captured.graph_hash,
    )
    limit = room * free.predicted.memory_bytes
    small = replace(cluster, device=replace(cluster.device, memory_bytes=int(limit / cluster.device.usable_memory)))
    made = plan(
        who.captured.gm,
        who.captured.hints,
        Request(small, time_limit_s=5.0),
        model="gpt",
        graph_hash=who.captured.graph_hash,
    )
    assert made.predicted.memory_bytes <= limit
    assert all(other.memory_bytes is None or other.memory_bytes <= limit for other in made.alternatives)
    assert made.predicted.bound_s <= made.predicted.step_s


def test_room_shrinks_until_the_peak_fits() -> None:
    """Of an answer that fills its room, with a fifth more for a moment."""
    asked: list[float] = []

    def solve(room: float) -> float:
        asked.append(room)
        if room < 50:
            raise InfeasibleError("nothing is that small", missing_bytes=50 - room)
        return room

    assert within(100.0, solve, lambda answer: 1.2 * answer) <= 100 / 1.2
    assert asked == [100.0, 80.0, 90.0], "what fits, and whether more does"
    with pytest.raises(InfeasibleError, match="the peak of the step is 5 B over the 55 B of a device") as raised:
        within(55.0, solve, lambda answer: 1.2 * answer)
    assert raised.value.missing_bytes == pytest.approx(5), "and not what is missing of the room that was tried last"
    with pytest.raises(InfeasibleError, match="nothing is that small"):
        within(45.0, solve, lambda answer: 1.2 * answer)


def test_an_answer_that_comes_in_wholes_is_left() -> None:
    """Of 40, 80 or 120, with a fifth more for a moment: a little less room than 100 still gives 80, whose peak is
    96."""

    def solve(room: float) -> float:
        return max(n for n in (40.0, 80.0, 120.0) if n <= room)

    assert within(92.0, solve, lambda answer: 1.2 * answer) == 40.0


def test_between_too_much_room_and_too_little() -> None:
    """Of 120, whose peak is half as much again, and 70 and 68, which fit; what is above the limit of 120 leaves 59 for
    the next try, and nothing is that small."""
    asked: list[float] = []

    def solve(room: float) -> float:
        asked.append(room)
        if room < 68:
            raise InfeasibleError("nothing is that small", missing_bytes=70 - room)
        return max(n for n in (68.0, 70.0, 120.0) if n <= room)

    assert within(120.0, solve, lambda answer: 181.0 if answer == 120 else 115.0) == 70.0
    assert min(asked) < 68


def test_what_is_missing_may_be_said_too_large() -> None:
    """Nothing is below 50, which is told as 300 too few."""

    def solve(room: float) -> float:
        if room < 50:
            raise InfeasibleError("nothing is that small", missing_bytes=300.0)
        return room

    assert within(100.0, solve, lambda answer: 2 * answer - 20) <= 60


def test_where_a_step_would_leave_nothing_less_is_tried() -> None:
    """A peak of more than twice the limit, which falls faster than the room does."""
    assert within(100.0, lambda room: room, lambda answer: 100 + 5 * (answer - 60) if answer > 60 else 90.0) <= 60


def test_what_was_passed_by_is_tried() -> None:
    """From 82 on 64, and 74 on 46, of which less is kept and more lives for a moment: what fits is between."""

    def solve(room: float) -> float:
        if room < 45:
            raise InfeasibleError("nothing is that small", missing_bytes=45 - room)
        return max(n for n in (45.0, 53.0, 62.0) if n <= room)

    assert within(64.0, solve, lambda answer: {62.0: 82.0, 53.0: 56.0, 45.0: 74.0}[answer]) == 53.0
    with pytest.raises(InfeasibleError, match="the peak of the step is 10 B over the 64 B of a device"):
        within(64.0, solve, lambda answer: {62.0: 82.0, 53.0: 75.0, 45.0: 74.0}[answer])


def test_an_answer_that_fills_little_of_its_room_is_not_asked_for_again() -> None:
    """Of 40, whatever room there is, and 30, with 65 more for a moment: what is above the limit of 100 is what 40 has
    too many, and not 100."""
    asked: list[float] = []

    def solve(room: float) -> float:
        asked.append(room)
        return 40.0 if room >= 40 else 30.0

    assert within(100.0, solve, lambda answer: answer + 65, counted_bytes=lambda answer: answer) == 30.0
    assert asked == [100.0, 35.0, 37.5]


def test_what_fits_is_between_answers_whose_peak_rises_as_room_falls() -> None:
    """Of 50, 42, 40, 38 and 30, which have peaks of 82, 59, 52, 72 and 62: there is room for the peak of 40 alone."""
    peaks = {50.0: 82.0, 42.0: 59.0, 40.0: 52.0, 38.0: 72.0, 30.0: 62.0}
    asked: list[float] = []

    def solve(room: float) -> float:
        asked.append(room)
        if room < 30:
            raise InfeasibleError("nothing is that small", missing_bytes=30 - room)
        return max(n for n in peaks if n <= room)

    assert within(53.0, solve, peaks.__getitem__, counted_bytes=lambda answer: answer) == 40.0
    assert len(asked) == len(set(asked)) <= 8


def test_more_room_is_tried_where_what_fits_had_far_less() -> None:
    """Of 90, 60 and 40, with 20 more for a moment and 60 more for the first: 40 fits, and so does 60."""

    def solve(room: float) -> float:
        return max(n for n in (40.0, 60.0, 90.0) if n <= room)

    assert (
        within(100.0, solve, lambda answer: answer + (60 if answer > 80 else 20), counted_bytes=lambda answer: answer)
        == 60.0
    )


def test_where_nothing_has_so_little_room_nothing_else_is_asked_for() -> None:
    asked: list[float] = []

    def solve(room: float) -> float:
        asked.append(room)
        raise InfeasibleError("nothing is that small", missing_bytes=1.0)

    with pytest.raises(InfeasibleError, match="nothing is that small"):
        within(100.0, solve, lambda answer: 0.0)
    assert asked == [100.0]


def _answers(planner: Planner, mesh: tuple[int, ...]) -> list[float]:
    """The peaks of what a mesh is laid out like with ever less room, until nothing is that small."""
    model, peaks, room = planner.model(mesh, space(mesh), "any room"), list[float](), math.inf
    with suppress(InfeasibleError):
        while True:
            solution = ilp.glance(model.with_limit(room).problem, time_limit_s=2.0)
            found = planner.counted(
                Candidate(
                    "search",
                    planner.request.cluster.mesh(mesh),
                    model,
                    solution,
                    model.problem.evaluate(solution.choice),
                )
            )
            peaks.append(found.peak)
            room = 0.97 * min(room, found.counted_bytes)
    return peaks


@pytest.mark.parametrize(
    ("layers", "batch", "cluster", "mesh"),
    [
        (1, 2048, "l4:1x4", (2, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 4096, "h100:2x4", (2, 4)), (1, 4096, "l4:2x4", (4, 2)), (2, 4096, "l4:2x2", (2, 2)))
        ),
    ],
)
def test_whatever_fits_with_some_room_is_found(layers: int, batch: int, cluster: str, mesh: tuple[int, ...]) -> None:
    """Where that has a peak of just the memory there is, something is found that fits."""
    request = Request(Cluster.parse(cluster))
    planner = Planner.of(graph(layers), {"b": batch}, request)
    peaks = sorted(set(_answers(planner, mesh)))
    assert len(peaks) > 3
    for peak in peaks:
        there = planner.anew(replace(request, memory_bytes=1.001 * peak)).candidate(
            mesh, space(mesh), "search", partial(ilp.glance, time_limit_s=2.0)
        )
        assert there.peak <= 1.001 * peak
