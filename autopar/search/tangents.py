"""Descent from other starts: near a solution a State is nearly linear, and the optimum of that linear Problem mostly lies in another valley.

    tangent     the Problem whose seconds grow as those of the State do there, over a small spread or a wide one: what is steep near by may be flat farther off
    glance      a solution of it; descent by the State from there. Where that is faster than all before, once more from there
    honed       the fastest by the State, honed by the price

Deterministic but where it is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.problem.types import Net, Node, Problem
from autopar.search import ilp
from autopar.search.descent import descend
from autopar.search.honing import GAIN, TRIED, Choice, honed
from autopar.search.state import BYTES, FIXED, FORBIDDEN, State

SPREADS = (0.003, 0.03, 0.1, 0.3)
"""Shares of the seconds by which each total is moved to see how steep it is."""

GLANCE_S = 10.0
"""For one Problem at most; it takes a fraction of a second."""


def roamed(state: State, start: Choice, price_s: Callable[[Choice], float], late: Callable[[], bool] = lambda: False, tried: int = TRIED) -> tuple[Choice, float]:
    """As `honing.honed`: a solution that fits and no slower than `start`, which fits, and its seconds by `price_s`."""
    best, start_s = _valley(state, start, late), price_s(start)
    found, found_s = honed(state, best, price_s, late, tried)
    return (found, found_s) if found_s < start_s or best == start else honed(state, start, price_s, late, tried)


def promises(state: State, start: Choice, below_s: float) -> bool:
    """Whether one tangent at `start`, of the widest spread, leads below so many seconds by the State."""
    state.reset(start)
    takes_time = float(state.seconds(state.totals)[0]) > 0.0
    return takes_time and _descended(tangent(state, SPREADS[-1]), state) is not None and float(state.seconds(state.totals)[0]) < below_s


def _valley(state: State, start: Choice, late: Callable[[], bool]) -> Choice:
    """The fastest by the State of what is reached from `start`, tangent by tangent."""
    state.reset(start)
    best, best_s, before_s = start, float(state.seconds(state.totals)[0]), math.inf
    while 0.0 < best_s < before_s * (1 - GAIN) and not late():
        before_s = best_s
        state.reset(best)
        for problem in [tangent(state, spread) for spread in SPREADS]:
            choice = None if late() else _descended(problem, state)
            if choice is not None and (seconds := float(state.seconds(state.totals)[0])) < best_s:
                best, best_s = choice, seconds
    return best


def _descended(problem: Problem, state: State) -> Choice | None:
    """Where descent ends from a solution of a tangent; the State is there then."""
    try:
        return descend(problem, ilp.glance(problem, time_limit_s=GLANCE_S).choice, math.inf, state)
    except InfeasibleError:
        return None


def tangent(state: State, spread: float) -> Problem:
    """The Problem whose seconds grow with each total as those of `state` do where it is, within `spread` of them; memory and what is forbidden are its own.
    ValueError where it takes no time: there is nothing to take a share of."""
    slopes = _slopes(state, spread)
    nodes = [Node(node.name, node.labels, _limited(own, slopes), own[BYTES], np.zeros(own.shape[1])) for node, own in zip(state.problem.nodes, state.own, strict=True)]
    nets = [Net(net.name, net.producer, net.row, net.uses, _limited(table, slopes[state.slots[t]]), table[BYTES])
            for t, (net, table) in enumerate(zip(state.problem.nets, state.tables, strict=True))]
    return replace(state.problem, nodes=tuple(nodes), nets=tuple(nets), groups=0, lanes=(), memory_limit_bytes=state.limit_bytes)


def _limited(features: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Seconds at some slopes, no less than none."""
    return np.where(features[FORBIDDEN] > 0, np.inf, np.maximum(0.0, np.tensordot(slopes, features, 1)))


def _slopes(state: State, spread: float) -> np.ndarray:
    """By total, how much longer a step takes for one more of it; nothing for bytes and what is forbidden."""
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
