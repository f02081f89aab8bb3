"""What the search accepts fits: a Problem's own count of bytes is checked by the walk over the emitted program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.memory import predict
from autopar.memory.within import within
from autopar.onestage import plan
from autopar.planner import Planner
from autopar.recipes import RECIPES
from autopar.report.explain import choice_of
from autopar.request import Request
from tests.helpers.verify import by_recipe, subject

CASES = [(name, recipe) for name in ("gpt", "hf-gpt2", "mlp", "cnn", "moe", "recommender") for recipe in ("ddp", "zero1", "zero3", "megatron")]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_the_two_counts_are_within_a_factor_of_two(name: str, recipe: str) -> None:
    """What lives for a moment is at most as much again as what the Problem counts; and what it counts is not all there at once."""
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
    free = plan(who.captured.gm, who.captured.hints, Request(cluster, time_limit_s=5.0), model="gpt", graph_hash=who.captured.graph_hash)
    limit = room * free.predicted.memory_bytes
    small = replace(cluster, device=replace(cluster.device, memory_bytes=int(limit / cluster.device.usable_memory)))
    made = plan(who.captured.gm, who.captured.hints, Request(small, time_limit_s=5.0), model="gpt", graph_hash=who.captured.graph_hash)
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
    assert asked[0] == 100.0 and asked == sorted(asked, reverse=True)
    with pytest.raises(InfeasibleError, match="nothing is that small"):
        within(55.0, solve, lambda answer: 1.2 * answer)


def test_an_answer_that_comes_in_wholes_is_left() -> None:
    """Of 40, 80 or 120, with a fifth more for a moment: a little less room than 100 still gives 80, whose peak is 96."""
    def solve(room: float) -> float:
        return max(n for n in (40.0, 80.0, 120.0) if n <= room)

    assert within(92.0, solve, lambda answer: 1.2 * answer) == 40.0


def test_between_too_much_room_and_too_little() -> None:
    """Of 120, whose peak is half as much again, and 70 and 68, which fit; what is above the limit of 120 leaves 59 for the next try, and nothing is that small."""
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
    with pytest.raises(InfeasibleError, match="nothing is that small"):
        within(64.0, solve, lambda answer: {62.0: 82.0, 53.0: 75.0, 45.0: 74.0}[answer])
