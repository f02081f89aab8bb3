"""Coordinate descent from one solution, which every strategy builds on; and which of two solutions is better."""

from __future__ import annotations

import time

import numpy as np

from autopar.problem.types import Picks, Problem
from autopar.search.state import TOLERANCE, Penalty, State

_SWEEPS = 4  # forwards and backwards twice: message passing does not need a local optimum to start from
_RAISES = 24  # how often the price of a byte over the limit is raised, by 4 each time: 14 orders of magnitude


def descend(
    problem: Problem, start: tuple[int, ...] | None, deadline: float, state: State | None = None
) -> tuple[int, ...] | None:
    """A solution that no move of a single node improves, reached from `start`, or from an empty assignment where that
    is None. Returns None when the result is infeasible.

    `deadline` is a time of `time.perf_counter`; the sweep that runs past it is the last one. `state` is a State of
    `problem` to work with, for callers that descend often.
    """
    placed = [-1] * len(problem.nodes) if start is None else start
    if state is None:
        state = State(problem, placed)
    else:
        state.reset(placed)
    scale = state.scale_s
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
    """Coordinate descent, forwards and backwards, until no move helps, time is up, or _SWEEPS are done. A node that no
    move of its own improves is skipped until a neighbour moves or the next sweep begins."""
    order = list(range(len(state.choice)))
    restless = np.array([c < 0 for c in state.choice])
    if not restless.any():
        restless = state.restless(penalty)
    for _ in range(_SWEEPS):
        if not restless.any():
            return
        for v in order:
            if restless[v]:
                _settle(state, v, penalty, restless)
        if time.perf_counter() > deadline:
            return
        order.reverse()
        restless = state.restless(penalty)


def _settle(state: State, v: int, penalty: Penalty, restless: np.ndarray) -> None:
    """Move node `v` to its best choice; if it moved, mark its neighbours as `restless`."""
    scores = state.score(state.after_all(v), penalty)
    c, now = int(scores.argmin()), state.choice[v]
    if now < 0 or scores[c] < scores[now] - TOLERANCE * abs(scores[now]):
        state.move(v, c)
        restless[state.near[v]] = True


def fits(problem: Problem, choice: Picks) -> bool:
    """Whether `choice` is feasible."""
    cost = problem.price(choice)
    return cost.feasible and cost.memory_bytes <= problem.memory_limit_bytes * (1 + 1e-9)


def better(problem: Problem, one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The feasible one of least time, None if neither is feasible; `one` where they are equally fast."""
    candidates = [c for c in dict.fromkeys((one, other)) if c is not None and fits(problem, c)]
    return min(candidates, key=lambda c: problem.price(c).time_s, default=None)
