"""One Problem at ever other costs: bounds that hold and solutions that are what they cost, whatever the messages were
before."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.problem.types import Problem
from autopar.search import exhaustive
from autopar.search.messages import Messages
from autopar.search.recosted import Recosted
from tests.helpers.problems import random_problem


def plain(seed: int) -> Problem:
    """A random Problem whose costs just add up."""
    problem = random_problem(seed, tight=False)
    nodes = tuple(replace(node, group=-1, lane=None, hide_s=np.zeros(len(node.cost_s))) for node in problem.nodes)
    nets = tuple(replace(net, group=-1, shown=0.0) for net in problem.nets)
    return Problem(nodes, nets, 0, math.inf, problem.name)


def other_costs(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same with everything costing something else; what is forbidden stays so."""
    nodes = tuple(
        replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, rng.random(len(node.cost_s))))
        for node in problem.nodes
    )
    nets = tuple(
        replace(net, cost_s=np.where(np.isinf(net.cost_s), np.inf, rng.random(net.cost_s.shape)))
        for net in problem.nets
    )
    return replace(problem, nodes=nodes, nets=nets)


def bound_s(recosted: Recosted, problem: Problem, target_s: float = math.inf) -> float:
    return recosted.bound_s([node.cost_s for node in problem.nodes], [net.cost_s for net in problem.nets], target_s)


def test_bounds_hold_at_all_costs_and_are_mostly_the_optimum() -> None:
    near = []
    for seed in range(60):
        problem, rng = plain(seed), np.random.default_rng(seed)
        try:
            exhaustive.search(problem, time_limit_s=5)
        except InfeasibleError:
            continue
        recosted = Recosted(problem)
        for _ in range(6):
            problem = other_costs(problem, rng)
            best_s, found_s = exhaustive.search(problem, time_limit_s=5).bound_s, bound_s(recosted, problem)
            assert found_s <= best_s + 1e-9
            near.append(found_s / best_s)
            choice = recosted.solution()
            if choice is not None:
                assert (
                    recosted.seconds(choice) == pytest.approx(problem.evaluate(choice).time_s)
                    and recosted.seconds(choice) >= best_s - 1e-9
                )
    assert len(near) > 100 and np.mean(near) > 0.97 and np.mean(np.array(near) > 1 - 1e-3) > 0.6


def test_nothing_to_bound_where_nothing_is_possible() -> None:
    problem = plain(1)
    barred = replace(
        problem,
        nodes=(replace(problem.nodes[0], cost_s=np.full(len(problem.nodes[0].cost_s), np.inf)), *problem.nodes[1:]),
    )
    with pytest.raises(InfeasibleError):
        Recosted(barred)


def test_nobody_sweeps_on_when_the_bound_is_high_enough() -> None:
    problem = plain(1)
    recosted = Recosted(problem)
    most_s = bound_s(recosted, problem)
    with patch.object(Messages, "sweep", autospec=True, side_effect=Messages.sweep) as sweep:
        assert bound_s(recosted, problem, most_s / 2) >= most_s / 2
    assert [call.kwargs["forwards"] for call in sweep.call_args_list] == [True, False]
