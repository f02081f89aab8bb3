"""Moves priced one node at a time, against Problem.price of the whole."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given

from autopar.problem.types import Problem
from autopar.search import state as module
from autopar.search.state import Penalty, State
from tests.helpers.examples import examples
from tests.helpers.problems import problems


@given(problems(nodes=6))
@examples(100)
def test_after_and_move_agree_with_price(problem: Problem) -> None:
    rng = np.random.default_rng(len(problem.nodes))
    state = State(problem, [0] * len(problem.nodes))
    for _ in range(6):
        v = int(rng.integers(len(problem.nodes)))
        choices = np.arange(len(problem.nodes[v].labels))
        totals = state.after(v, choices)
        scores = state.score(totals, Penalty(0.0, 1e9))
        for c in choices:
            cost = problem.price((*state.choice[:v], int(c), *state.choice[v + 1 :]))
            assert totals[1, c] == pytest.approx(cost.memory_bytes)
            assert (totals[2, c] > 0.5) == (not cost.feasible)
            if cost.feasible:
                assert scores[c] == pytest.approx(cost.time_s)
        state.move(v, int(rng.choice(choices)))


@given(problems())
@examples(50)
def test_placing_node_by_node_gives_the_same_totals(problem: Problem) -> None:
    choice = tuple(len(node.labels) - 1 for node in problem.nodes)
    state = State(problem, [-1] * len(choice))
    for v in reversed(range(len(choice))):
        state.move(v, choice[v])
    assert np.allclose(state.totals, State(problem, choice).totals)


@given(problems(nodes=6))
@examples(50)
def test_what_is_kept_of_nets_is_what_is_counted_anew(problem: Problem) -> None:
    """Also where little is kept, and after other costs."""
    rng = np.random.default_rng(len(problem.nodes))
    nets = tuple([replace(net, cost_s=2.0 * net.cost_s) for net in problem.nets])
    with mock.patch.object(module, "KNOWN", 2):
        state = State(problem, [0] * len(problem.nodes))
        for priced in (problem, replace(problem, nets=nets)):
            state.reprice(priced)
            for _ in range(20):
                choice = tuple(int(rng.integers(len(node.labels))) for node in problem.nodes)
                state.reset(choice)
                assert np.array_equal(state.changes(), State(priced, choice).changes())
