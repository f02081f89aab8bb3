"""Local search that can leave a local optimum: near a solution the State's seconds are nearly linear, and the optimum
of the linearised Problem is another place to start from. Called by the planner after `ilp`, where a step is priced by
its passes.

    tangent     the linear Problem with the slopes of the State's seconds at a solution. They are difference quotients
                over a small or a wide spread, because the seconds may be steep near by and flat farther off
    descent     a quick solution of the tangent, then descent by the State from there; repeated while that gains
    honed       the fastest solution by the State, improved by the price of a step (search.honing)

Deterministic unless it is cut short by time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.problem.types import Net, Node, Picks, Problem
from autopar.search import ilp
from autopar.search.descent import descend
from autopar.search.honing import LEAST_GAIN, PRICED_MOVES, honed
from autopar.search.state import BYTES, FIXED, FORBIDDEN, State

SPREADS = (0.003, 0.03, 0.1, 0.3)
"""How far each total is moved to measure its slope, as shares of the seconds of a step."""

GLANCE_S = 10.0
"""Seconds at most to solve one tangent, which takes a fraction of one."""


def roamed(
    state: State,
    start: Picks,
    price_s: Callable[[Picks], float],
    late: Callable[[], bool] = lambda: False,
    tried: int = PRICED_MOVES,
) -> tuple[Picks, float]:
    """As `honing.honed`: a solution that fits and is no slower than `start`, which fits; and its seconds by
    `price_s`."""
    best, start_s = _by_tangents(state, start, late), price_s(start)
    found, found_s = honed(state, best, price_s, late, tried)
    return (found, found_s) if found_s < start_s or best == start else honed(state, start, price_s, late, tried)


def promises(state: State, start: Picks, below_s: float) -> bool:
    """Whether descent from a tangent at `start`, of any spread, ends at a solution that takes less than `below_s` by
    the State."""
    for spread in SPREADS:
        state.reset(start)
        if float(state.seconds(state.totals)[0]) <= 0.0:
            return False
        if _descended(tangent(state, spread), state) is not None and float(state.seconds(state.totals)[0]) < below_s:
            return True
    return False


def _by_tangents(state: State, start: Picks, late: Callable[[], bool]) -> Picks:
    """The fastest solution by the State that is reached from `start` by tangents and descent."""
    state.reset(start)
    best, best_s, before_s = start, float(state.seconds(state.totals)[0]), math.inf
    while 0.0 < best_s < before_s * (1 - LEAST_GAIN) and not late():
        before_s = best_s
        state.reset(best)
        for problem in [tangent(state, spread) for spread in SPREADS]:
            choice = None if late() else _descended(problem, state)
            if choice is not None and (seconds := float(state.seconds(state.totals)[0])) < best_s:
                best, best_s = choice, seconds
    return best


def _descended(problem: Problem, state: State) -> Picks | None:
    """The end of a descent by `state` that begins at a solution of the tangent `problem`; `state` is left there. None
    where nothing fits."""
    try:
        return descend(problem, ilp.glance(problem, time_limit_s=GLANCE_S).choice, math.inf, state)
    except InfeasibleError:
        return None


def tangent(state: State, spread: float) -> Problem:
    """The Problem linearised at `state`: its seconds grow with each total as those of `state` do within `spread`.
    Memory and forbidden entries are unchanged. Raises ValueError where the present solution takes no time."""
    slopes = _slopes(state, spread)
    nodes = [
        Node(node.name, node.labels, _linear_s(own, slopes), own[BYTES], np.zeros(own.shape[1]))
        for node, own in zip(state.problem.nodes, state.own, strict=True)
    ]
    nets = [
        Net(net.name, net.producer, net.row, net.uses, _linear_s(table, slopes[state.slots[t]]), table[BYTES])
        for t, (net, table) in enumerate(zip(state.problem.nets, state.tables, strict=True))
    ]
    return replace(
        state.problem, nodes=tuple(nodes), nets=tuple(nets), groups=0, lanes=(), memory_limit_bytes=state.limit_bytes
    )


def _linear_s(features: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """[...] seconds of table entries `features` [totals, ...] with these slopes, at least 0; infinite where
    forbidden."""
    return np.where(features[FORBIDDEN] > 0, np.inf, np.maximum(0.0, np.tensordot(slopes, features, 1)))


def _slopes(state: State, spread: float) -> np.ndarray:
    """[totals] the slope of the State's seconds in each total, by a difference quotient; 0 for bytes and forbidden
    pairs."""
    totals = state.totals
    step = spread * float(state.seconds(totals)[0])
    if step <= 0.0:
        raise ValueError("a solution that takes no time has no tangent: there is nothing to take a share of")
    moved = np.arange(len(totals))
    less = np.minimum(step, np.maximum(totals[:, 0], 0.0)) * (moved >= FIXED)
    up, down = np.repeat(totals, len(totals), 1), np.repeat(totals, len(totals), 1)
    up[moved, moved] += step
    down[moved, moved] -= less
    found = (state.seconds(up) - state.seconds(down)) / (step + less)
    found[[BYTES, FORBIDDEN]] = 0.0
    return np.asarray(found)
