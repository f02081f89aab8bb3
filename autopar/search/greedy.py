"""Node by node, then coordinate descent: fast, and a good start for the others.

1. place the nodes in order, each on the choice that is cheapest given those before it;
2. sweep over the nodes, moving each to its best choice, until nothing changes;
3. while memory is over the limit, raise the price of a byte and sweep again; then sweep with feasible moves only.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.problem.types import Problem, Solution
from autopar.search.feasible import better, least_memory
from autopar.search.state import Penalty, State, scale_s

_RAISES = 24  # the price of a byte grows fourfold each time: 14 orders of magnitude


def search(problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None) -> Solution:
    """A locally optimal solution, not worse than `start`; deterministic, `seed` changes nothing.

    Raises InfeasibleError with the shortfall when nothing fits.
    """
    deadline = time.perf_counter() + time_limit_s
    found = descend(problem, None, deadline)
    if start is not None:
        found = better(problem, better(problem, start, descend(problem, start, deadline)), found)
    note = "coordinate descent"
    if found is None:
        least = least_memory(problem, time_limit_s=max(1.0, deadline - time.perf_counter()))
        found = better(problem, least, descend(problem, least, deadline))
        assert found is not None, "least_memory gives a feasible solution"
        note = "coordinate descent from the solution of least memory"
    return Solution(found, "greedy", note=note)


def descend(problem: Problem, start: tuple[int, ...] | None, deadline: float) -> tuple[int, ...] | None:
    """A solution that no single move improves, from `start` or built up from nothing; None when it is infeasible.

    `deadline` is a time of `time.perf_counter`; past it, the sweep at hand is the last.
    """
    scale = scale_s(problem)
    state = State(problem, [-1] * len(problem.nodes) if start is None else start)
    limit = problem.memory_limit_bytes
    byte_s = 0.0 if start is None or np.isinf(limit) else 1e6 * scale / max(limit, 1.0)
    for raised in range(_RAISES + 1):
        _sweep(state, Penalty(byte_s, scale), deadline)
        if state.feasible() or np.isinf(limit):
            break
        byte_s = 1e-4 * scale / max(limit, 1.0) * 4.0**raised
    if state.feasible() and byte_s > 0:
        _sweep(state, Penalty(1e6 * scale / max(limit, 1.0), 1e6 * scale), deadline)
    return tuple(state.choice) if state.feasible() else None


def _sweep(state: State, penalty: Penalty, deadline: float) -> None:
    """Coordinate descent, forwards and backwards, until no move helps or time is up (one pass is always made)."""
    order = list(range(len(state.choice)))
    changed = True
    while changed:
        changed = False
        for v in order:
            scores = state.score(state.after(v, np.arange(len(state.own[v][0]))), penalty)
            c = int(scores.argmin())
            now = state.choice[v]
            if now < 0 or scores[c] < scores[now] - 1e-12 * abs(scores[now]):
                state.move(v, c)
                changed = True
        order.reverse()
        if time.perf_counter() > deadline:
            return
