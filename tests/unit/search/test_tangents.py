"""Descent from the optima of tangents: what tangents are, and what comes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from autopar.problem.types import Problem
from autopar.search import exhaustive
from autopar.search.descent import fits
from autopar.search.honing import honed
from autopar.search.state import State
from autopar.search.tangents import SPREADS, promises, roamed, tangent
from tests.helpers.examples import examples
from tests.helpers.problems import problems, random_problem


class Steep(State):
    """Seconds that grow with the square of what they are of the Problem: one optimum, tangents of every slope."""

    def seconds(self, totals: np.ndarray) -> np.ndarray:
        return np.asarray(super().seconds(totals) ** 2 / self.scale_s)


@given(problems(nodes=5))
@examples(60)
def test_a_tangent_allows_what_the_state_allows_and_touches_it(problem: Problem) -> None:
    start = tuple(0 for _ in problem.nodes)
    if not fits(problem, start) or problem.groups or problem.lanes:
        return
    state = State(problem, start)
    for spread in SPREADS:
        found = tangent(state, spread)
        for choice in (start, tuple(len(node.labels) - 1 for node in problem.nodes)):
            ours, own = found.price(choice), problem.price(choice)
            assert ours.feasible == own.feasible
            assert ours.memory_bytes == pytest.approx(own.memory_bytes)
            if own.feasible:
                assert ours.time_s == pytest.approx(own.time_s)  # a State of no groups is linear


@given(problems(nodes=5))
@examples(60)
def test_it_is_no_worse_than_the_start_and_no_move_is_better(problem: Problem) -> None:
    start = tuple(0 for _ in problem.nodes)
    if not fits(problem, start):
        return
    state = Steep(problem, start)

    def price_s(choice: tuple[int, ...]) -> float:
        state_of = Steep(problem, choice)
        return float(state_of.seconds(state_of.totals)[0])

    best, best_s = roamed(state, start, price_s)
    assert fits(problem, best) and best_s == price_s(best) <= price_s(start)
    assert honed(state, best, price_s)[1] >= best_s * (1 - 1e-4)


def test_what_takes_no_time_stays() -> None:
    """Four choices of two nodes, none of which costs anything."""
    free = random_problem(0, nodes=2)
    free = replace(
        free,
        nodes=tuple(
            replace(node, cost_s=np.zeros_like(node.cost_s), hide_s=np.zeros_like(node.hide_s), group=-1)
            for node in free.nodes
        ),
        nets=(),
        groups=0,
    )
    state = State(free, (0, 0))
    assert roamed(state, (0, 0), lambda choice: 0.0) == ((0, 0), 0.0)
    assert not promises(state, (0, 0), math.inf)
    with pytest.raises(ValueError, match="no time"):
        tangent(state, SPREADS[0])


def test_tangents_promise_no_more_than_is_reached() -> None:
    better = 0
    for seed in range(60):
        problem = random_problem(seed, nodes=6)
        start = tuple(len(node.labels) - 1 for node in problem.nodes)
        if not fits(problem, start):
            continue
        state, start_s = State(problem, start), problem.price(start).time_s

        def price_s(choice: tuple[int, ...], problem: Problem = problem) -> float:
            return problem.price(choice).time_s

        reached_s = roamed(state, start, price_s)[1]
        assert promises(state, start, math.inf)
        assert not promises(state, start, reached_s * (1 - 1e-9))
        better += promises(state, start, start_s)
    assert better > 5


def test_it_reaches_most_optima_that_descent_alone_does_not() -> None:
    """Of random Problems with the seconds of their groups, against all solutions there are."""
    near = alone = tried = 0
    for seed in range(200):
        problem = random_problem(seed, nodes=6)
        start = tuple(len(node.labels) - 1 for node in problem.nodes)
        if not fits(problem, start):
            continue
        tried += 1
        best_s = problem.price(exhaustive.search(problem, time_limit_s=30).choice).time_s

        def price_s(choice: tuple[int, ...], problem: Problem = problem) -> float:
            return problem.price(choice).time_s

        state = State(problem, start)
        near += roamed(state, start, price_s)[1] <= best_s * (1 + 1e-9)
        alone += honed(state, start, price_s)[1] <= best_s * (1 + 1e-9)
    assert tried > 20
    assert near >= 0.95 * tried
    assert near > alone
