"""Every strategy on 50 tiny random problems, against the exhaustive oracle."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autopar.errors import InfeasibleError, PlanError
from autopar.problem.types import Node, Problem, Solution
from autopar.search import SEARCHES, checked
from autopar.search.descent import fits
from autopar.search.exact import Exact
from autopar.search.feasible import feasible, least_memory
from tests.helpers.problems import random_problem

SEEDS = range(50)
EXACT = ("exhaustive", "ilp")


@cache
def oracle(seed: int) -> tuple[float, tuple[int, ...]] | None:
    """(least time, its choice) by pricing every combination with Problem.price; None when nothing is feasible."""
    problem = random_problem(seed)
    best = None
    for choice in itertools.product(*(range(len(n.labels)) for n in problem.nodes)):
        cost = problem.price(choice)
        if (
            cost.feasible
            and cost.memory_bytes <= problem.memory_limit_bytes
            and (best is None or cost.time_s < best[0])
        ):
            best = (cost.time_s, choice)
    return best


def test_the_sample_has_both_kinds() -> None:
    infeasible = [seed for seed in SEEDS if oracle(seed) is None]
    assert 3 <= len(infeasible) <= 25


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SEARCHES)
def test_against_the_oracle(name: str, seed: int) -> None:
    problem, best = random_problem(seed), oracle(seed)
    if best is None:
        with pytest.raises(InfeasibleError):
            SEARCHES[name](problem, time_limit_s=5)
        return
    found = SEARCHES[name](problem, time_limit_s=5, seed=1)
    time_s = problem.evaluate(found.choice).time_s
    assert time_s >= best[0] - 1e-9
    assert found.bound_s <= best[0] + 1e-9
    if name in EXACT:
        assert found.optimal
        assert time_s == pytest.approx(best[0], abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", SEARCHES)
def test_never_worse_than_the_start(name: str, seed: int) -> None:
    best = oracle(seed)
    if best is not None:
        problem = random_problem(seed)
        found = SEARCHES[name](problem, time_limit_s=1, start=best[1])
        assert problem.evaluate(found.choice).time_s == pytest.approx(best[0])


@pytest.mark.parametrize("name", SEARCHES)
def test_same_seed_same_solution(name: str) -> None:
    problem = random_problem(3, nodes=7)
    assert SEARCHES[name](problem, time_limit_s=30, seed=5) == SEARCHES[name](problem, time_limit_s=30, seed=5)


@pytest.mark.parametrize("name", SEARCHES)
def test_too_little_memory_says_the_shortfall(name: str) -> None:
    gib = 2.0**30
    node = Node("weights", ("R", "S0"), np.array([1.0, 2.0]), np.array([8 * gib, 6 * gib]), np.zeros(2))
    problem = Problem((node, node), (), memory_limit_bytes=10 * gib, name="llama")
    with pytest.raises(
        InfeasibleError, match=r"llama.*needs 12\.000 GiB.*limit is 10\.000 GiB.*2\.000 GiB are missing"
    ):
        SEARCHES[name](problem, time_limit_s=5)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_needs_little_memory_fits_and_nothing_needs_less_than_the_least(seed: int) -> None:
    problem = random_problem(seed)
    priced = [problem.price(choice) for choice in itertools.product(*(range(len(n.labels)) for n in problem.nodes))]
    least_bytes = min((cost.memory_bytes for cost in priced if cost.feasible), default=np.inf)
    for solve in (feasible, least_memory):
        if oracle(seed) is None:
            with pytest.raises(InfeasibleError):
                solve(problem, time_limit_s=5)
        else:
            assert fits(problem, solve(problem, time_limit_s=5))
    if oracle(seed) is not None:
        assert problem.price(least_memory(problem, time_limit_s=5)).memory_bytes == pytest.approx(least_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_that_nothing_fits_is_proven_sooner_than_how_much_is_missing(seed: int) -> None:
    """With less room than the least, and with just as much."""
    whole = replace(random_problem(seed), memory_limit_bytes=math.inf)
    try:
        least_bytes = whole.price(least_memory(whole, time_limit_s=5)).memory_bytes
    except InfeasibleError:
        return  # whatever the memory
    assert fits(whole, least_memory(replace(whole, memory_limit_bytes=least_bytes), time_limit_s=5, sized=False))
    short = replace(whole, memory_limit_bytes=0.9 * least_bytes)
    with pytest.raises(InfeasibleError) as failed:
        least_memory(short, time_limit_s=5, sized=False)
    assert failed.value.missing_bytes is not None
    assert 0.0 < failed.value.missing_bytes <= 0.1 * least_bytes * (1 + 1e-6)


@pytest.mark.parametrize(("proven_bytes", "why"), [(11.0, "the limit is 10 bytes: 1 bytes are missing"), (9.0, "time")])
def test_what_is_proven_not_to_fit_is_not_said_to_want_time(
    proven_bytes: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where time is up between a proof that nothing fits and the least bytes of all."""
    problem = Problem((Node("n", ("a",), np.ones(1), np.full(1, 12.0), np.zeros(1)),), (), 0, 10.0)
    monkeypatch.setattr("autopar.search.feasible.minimise", lambda *_, **__: Exact((0,), proven_bytes, ""))
    with pytest.raises(InfeasibleError, match=why) as failed:
        least_memory(problem, time_limit_s=1.0)
    assert failed.value.missing_bytes == (1.0 if proven_bytes > 10.0 else None)


def test_exhaustive_refuses_large_problems() -> None:
    node = Node("n", tuple("abcdefgh"), np.ones(8), np.zeros(8), np.zeros(8))
    with pytest.raises(
        PlanError, match=r"2\.1e\+06 combinations of 7 nodes, at most 2,000,000 are possible; use search='ilp'"
    ):
        SEARCHES["exhaustive"](Problem((node,) * 7, ()), time_limit_s=5)


WRONG = {  # what a search of a user's answers -> what the error says
    "no Solution": (lambda problem, best: None, "gave None for .*; wanted a Solution"),
    "too few": (lambda problem, best: Solution(best[:-1], "mine"), "one entry for each of 5 nodes"),
    "no choice": (lambda problem, best: Solution(None, "mine"), "the choice None.* one entry for each of 5 nodes"),
    "no such option": (
        lambda problem, best: Solution((*best[:-1], 99), "mine"),
        r"choice 99 of node .*; wanted a whole number from 0 to \d",
    ),
    "negative": (lambda problem, best: Solution((-1, *best[1:]), "mine"), "choice -1 of node"),
    "a number that is not whole": (lambda problem, best: Solution((0.0, *best[1:]), "mine"), "choice 0.0 of node"),
    "too much memory": (
        lambda problem, best: Solution(most_memory(problem), "mine"),
        r"not feasible .*needs \d+ B per device, \d+ B are there",
    ),
    "a bound above its cost": (
        lambda problem, best: Solution(best, "mine", 2 * problem.evaluate(best).time_s),
        "a bound of .* proven",
    ),
    "no bound": (lambda problem, best: Solution(best, "mine", float("nan")), "a bound of nan"),
}


def most_memory(problem: Problem) -> tuple[int, ...]:
    """The choice of most memory among those that use no forbidden pair."""
    found = [
        choice
        for choice in itertools.product(*(range(len(n.labels)) for n in problem.nodes))
        if problem.price(choice).feasible
    ]
    return max(found, key=lambda choice: problem.price(choice).memory_bytes)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_of_a_users_search_are_refused(name: str) -> None:
    seed = next(
        seed
        for seed in SEEDS
        if oracle(seed) is not None
        and random_problem(seed).price(most_memory(random_problem(seed))).memory_bytes
        > random_problem(seed).memory_limit_bytes
    )
    answer, said = WRONG[name]
    problem, (_, best) = random_problem(seed), oracle(seed)
    with pytest.raises(PlanError, match=said):
        checked(lambda problem, **given: answer(problem, best))(problem, time_limit_s=1.0)


def test_a_right_answer_of_a_users_search_is_taken_as_plain_numbers() -> None:
    seed = next(seed for seed in SEEDS if oracle(seed) is not None)
    problem, (time_s, best) = random_problem(seed), oracle(seed)
    found = checked(lambda problem, **given: Solution(np.array(best), "mine", time_s))(problem, time_limit_s=1.0)
    assert found.choice == best and all(type(c) is int for c in found.choice)


def test_a_start_that_fits_is_the_answer_where_time_is_up_before_another_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where memory is short, descent finds nothing, and looking for little memory takes longer than there is."""

    def late(problem: Problem, **_: float) -> tuple[int, ...]:
        raise InfeasibleError("time was up")

    seed = next(seed for seed in SEEDS if oracle(seed) is not None)
    best = oracle(seed)
    assert best is not None
    monkeypatch.setattr("autopar.search.greedy.descend", lambda *_: None)
    monkeypatch.setattr("autopar.search.greedy.feasible", late)
    problem = random_problem(seed)
    found = SEARCHES["ilp"](problem, time_limit_s=1, start=best[1])
    assert found.choice == best[1] and found.bound_s == 0.0
    with pytest.raises(InfeasibleError, match="time was up"):
        SEARCHES["ilp"](problem, time_limit_s=1)


@pytest.mark.parametrize("enough", [True, False])
def test_nothing_is_proven_where_time_was_up(enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh without a solution counts as one that nothing fits, whose plans cannot be the fastest, only where that is
    proven."""
    problem = Problem((Node("n", ("a",), np.ones(1), np.full(1, 12.0), np.zeros(1)),), (), 0, 10.0)
    monkeypatch.setattr("autopar.search.feasible.minimise", lambda *_, **__: Exact((0,), 12.0 if enough else 9.0, ""))
    with pytest.raises(InfeasibleError) as failed:
        least_memory(problem, time_limit_s=1.0)
    assert failed.value.proven == ([] if enough else [0.0])
