"""Min-marginals against all combinations, and bounds that never pass the optimum nor rule it out."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.problem.presolve import select
from autopar.problem.types import Net, Node, Problem, Use
from autopar.search import dual, exhaustive
from autopar.search.factors import column_marginal, row_marginal
from tests.helpers.problems import random_problem


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_marginals_of_a_shared_net(seed: int, readers: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 9, (3, 4)).astype(float)
    messages = [rng.normal(size=4) * 5 for _ in range(readers)]
    rows = rng.normal(size=3)
    full = np.array(
        [
            [
                rows[r] + sum(table[r, d] for d in set(ds)) + sum(m[d] for m, d in zip(messages, ds, strict=True))
                for ds in itertools.product(range(4), repeat=readers)
            ]
            for r in range(3)
        ]
    )
    assert np.allclose(row_marginal(table, messages) + rows, full.min(1))
    by_use = full.min(0).reshape((4,) * readers)
    for use in range(readers):
        expected = by_use.min(axis=tuple(a for a in range(readers) if a != use))
        assert np.allclose(column_marginal(table, messages, use, rows), expected)


@pytest.mark.parametrize("seed", range(60))
def test_bound_and_what_it_leaves(seed: int) -> None:
    problem = random_problem(seed)
    try:
        optimum = exhaustive.search(problem, time_limit_s=5)
    except InfeasibleError:
        return
    known = _worst_feasible(seed, optimum.choice)
    found = dual.bound(problem, known, deadline=time.perf_counter() + 5)
    assert found.bound_s <= optimum.bound_s + 1e-9
    assert problem.evaluate(found.choice).time_s <= problem.evaluate(known).time_s
    if problem.evaluate(found.choice).time_s > optimum.bound_s + 1e-9:
        left = exhaustive.search(select(problem, found.keep), time_limit_s=5)
        assert left.bound_s == pytest.approx(optimum.bound_s)


def _worst_feasible(seed: int, choice: tuple[int, ...]) -> tuple[int, ...]:
    """A poor solution to begin from: single moves uphill from `choice`."""
    problem = random_problem(seed)
    for v, node in enumerate(problem.nodes):
        moved = [(*choice[:v], c, *choice[v + 1 :]) for c in range(len(node.labels))]
        feasible = [
            m
            for m in moved
            if problem.price(m).feasible and problem.price(m).memory_bytes <= problem.memory_limit_bytes
        ]
        choice = max(feasible, key=lambda m: problem.price(m).time_s)
    return choice


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_path_without_limits_is_closed(seed: int) -> None:
    """On a path one pass is dynamic programming: the bound is the optimum, also where choices share rows and
    columns."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, 6)
    nodes = tuple(Node(f"node{v}", ("",) * n, rng.random(n), np.zeros(n), np.zeros(n)) for v, n in enumerate(sizes))
    nets = tuple(
        Net(
            f"net{v}",
            v,
            rng.integers(0, 3, sizes[v]),
            (Use(v + 1, rng.integers(0, 4, sizes[v + 1])),),
            rng.random((3, 4)),
            np.zeros((3, 4)),
        )
        for v in range(5)
    )
    problem = Problem(nodes, nets)
    found = dual.bound(problem, (0,) * 6, deadline=time.perf_counter() + 5)
    assert found.bound_s == pytest.approx(exhaustive.search(problem, time_limit_s=5).bound_s)


def test_effort_counts_parts_and_entries() -> None:
    table = np.zeros((200, 100))
    row, column = np.arange(200), np.arange(100)
    nodes = (
        Node("a", ("x",) * 200, *(np.zeros(200),) * 3),
        *(Node(f"b{i}", ("x",) * 100, *(np.zeros(100),) * 3) for i in range(5)),
    )
    one = Net("one", 0, row, (Use(1, column),), table, table)
    five = Net("five", 0, row, tuple(Use(i, column) for i in range(1, 6)), table, table)
    assert dual.effort(Problem(nodes, (one,))) == 1 + 1
    # four readers in one part, one in another
    assert dual.effort(Problem(nodes, (five,))) == (1 + 16 / 2) + (1 + 2 / 2)
    assert dual.effort(Problem(nodes, ())) == 1
