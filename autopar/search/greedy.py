"""Node by node, then coordinate descent: fast, and a good start for the others.

1. place the nodes in order, each on the choice that is cheapest given those before it;
2. sweep over the nodes, moving each to its best choice, until nothing changes;
3. while memory is over the limit, raise the price of a byte and sweep again; then sweep with feasible moves only.
"""

from __future__ import annotations

import time

from autopar.problem.types import Problem, Solution
from autopar.search.descent import better, descend
from autopar.search.feasible import check_room, feasible
from autopar.search.state import State


def search(
    problem: Problem,
    *,
    time_limit_s: float,
    seed: int = 0,
    start: tuple[int, ...] | None = None,
    state: State | None = None,
    sized: bool = True,
) -> Solution:
    """A locally optimal solution, not worse than `start`; deterministic, `seed` changes nothing. `state` as `descend`
    has it, `sized` as `least_memory`.

    Raises InfeasibleError with the shortfall when nothing fits.
    """
    deadline = time.perf_counter() + time_limit_s
    check_room(problem)
    found = descend(problem, None, deadline, state)
    if start is not None:
        found = better(problem, better(problem, start, descend(problem, start, deadline)), found)
    note = "coordinate descent"
    if found is None:
        little = feasible(problem, time_limit_s=max(1.0, deadline - time.perf_counter()), sized=sized)
        found = better(problem, little, descend(problem, little, deadline))
        assert found is not None, "feasible gives a solution that fits"
        note = "coordinate descent from a solution of little memory"
    return Solution(found, "greedy", note=note)
