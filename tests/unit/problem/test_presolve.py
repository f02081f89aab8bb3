"""Presolve keeps the optimal time exactly, and its way back keeps the cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from autopar.errors import InfeasibleError
from autopar.problem.presolve import presolve
from autopar.problem.types import Node, Problem
from tests.helpers.examples import examples
from tests.helpers.problems import problems


def optimum(problem: Problem) -> float:
    """Least time of all feasible combinations; infinity when there is none."""
    best = float("inf")
    for choice in itertools.product(*(range(len(n.labels)) for n in problem.nodes)):
        cost = problem.price(choice)
        if cost.memory_bytes <= problem.memory_limit_bytes:
            best = min(best, cost.time_s)
    return best


@given(problems(nodes=4))
@examples(150)
def test_same_optimum(problem: Problem) -> None:
    expected = optimum(problem)
    try:
        small, restore = presolve(problem)
    except InfeasibleError:
        assert expected == float("inf")
        return
    assert optimum(small) == expected
    choice = tuple(len(n.labels) - 1 for n in small.nodes)
    back = restore(choice)
    assert problem.price(back) == small.price(choice)
    assert [n.labels[c] for n, c in zip(problem.nodes, back, strict=True)] == [
        n.labels[c] for n, c in zip(small.nodes, choice, strict=True)
    ]


def test_drops_dominated_equal_and_forbidden() -> None:
    cost_s = np.array([2.0, 1.0, 1.0, np.inf, 0.5])
    node = Node("n", tuple("abcde"), cost_s, np.array([1.0, 1.0, 1.0, 0.0, 3.0]), np.zeros(5))
    small, _ = presolve(Problem((node,), (), memory_limit_bytes=2.0))
    assert small.nodes[0].labels == ("b", "e")
    small, _ = presolve(Problem((node,), ()))
    assert small.nodes[0].labels == ("e",)


def test_says_which_node_has_no_choice_left() -> None:
    node = Node("gate", ("R", "S0"), np.array([np.inf, np.inf]), np.zeros(2), np.zeros(2))
    with pytest.raises(InfeasibleError, match=r"every choice of gate .*2 choices: R, S0"):
        presolve(Problem((node,), ()))
