"""Bounds by cases of how long passes wait for collectives: what is in the background moves under waits and under compute evenly, and slows waits for links that it takes, too,
which prices only know where the one is about so many times as long as the other (joint.price_polytope). The case of which least is proven is split, in the pass where that may
prove most, until there is nothing to gain.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.cutting_planes import Cutting, Level, Prices
from autopar.joint.effort import ROUNDS, Effort
from autopar.joint.relaxed import ALL, Key, Relaxed, Span, Sums
from autopar.joint.relaxed_solving import Seen
from autopar.problem.pass_tables import COMPUTE, WAITED

LIMIT_S = 60.0
"""So many seconds at most for the cases of one shape: where memory is short, one may take minutes and prove no more."""

NARROW = 1.1
"""Spans from less to so many times as much are not split further."""

AROUND = 0.85, 1.2
"""Where a span is split: at so many times what the solutions have that are met in it."""

SPREAD = 1.01
"""So narrow are spans by which it is seen what there is to gain."""

GAIN = 1e-5
"""Relative: what gains less is nothing."""

Of = tuple[Key, str]


@dataclass(order=True)
class _Case:
    """What is proven of `relaxed`, with what its passes take on the mean of the solutions that say no more is possible."""

    bound_s: float
    number: int
    relaxed: Relaxed = field(compare=False)
    mean: dict[Key, np.ndarray] = field(compare=False)


def bound_s(cutting: Cutting, keys: Sequence[Key], cutoff_s: float, effort: Effort) -> float:
    """Seconds that no solution of the one level of `cutting` beats, by as many cases of the passes `keys` as `effort` has; no more than `cutoff_s` is asked for."""
    level = cutting.levels[0]
    open_, made = [_case(cutting, keys, cutoff_s, 0)], 1
    deadline = time.perf_counter() + LIMIT_S
    while open_[0].bound_s < cutoff_s and made < effort.cases and time.perf_counter() < deadline:
        worst = heapq.heappop(open_)
        split = _split(worst, keys)
        if split is None:
            return worst.bound_s
        for span in split[1]:
            narrower = replace(worst.relaxed, spans={**worst.relaxed.spans, split[0]: span})
            found = _case(replace(cutting, levels=[Level(narrower, level.met)]), keys, cutoff_s, made)
            heapq.heappush(open_, replace(found, bound_s=max(found.bound_s, worst.bound_s)))
            made += 1
    return open_[0].bound_s


def _case(cutting: Cutting, keys: Sequence[Key], cutoff_s: float, number: int) -> _Case:
    level = cutting.levels[0]
    try:
        proven_s = cutting.bound_s(cutoff_s, ROUNDS)
    except InfeasibleError:
        return _Case(math.inf, number, level.relaxed, {})
    mean = {key: np.zeros(level.relaxed.passing.width + 1) for key in keys}
    for weight, sums in zip(cutting.weights, level.met, strict=False):  # the last one was met at the last prices
        for key in keys:
            mean[key] += weight * sums.passes[key]
    return _Case(proven_s, number, level.relaxed, mean)


def _split(case: _Case, keys: Sequence[Key]) -> tuple[Of, list[Span]] | None:
    """The pass of which most would be proven if its waits were known, of these the one that proves most by itself, and the spans that its own is taken apart into; None where
    that is nothing, or all are narrow."""
    gains = [(_least_s(case, key, {**case.relaxed.spans, **_around(case, key)}) - _least_s(case, key, case.relaxed.spans), key) for key in keys]
    for gain_s, key in sorted(gains, reverse=True):
        if gain_s <= GAIN * case.bound_s:
            return None
        open_ = {of: span for of, span in _around(case, key).items() if not _narrow(case.relaxed.spans.get(of, ALL))}
        if open_:
            of = max(open_, key=lambda of: _least_s(case, key, {**case.relaxed.spans, of: open_[of]}))
            return of, _parts(case.relaxed.spans.get(of, ALL), sum(open_[of]) / 2)
    return None


def _parts(span: Span, ratio: float) -> list[Span]:
    """`span` in parts, one of them around `ratio`."""
    least, most = span
    context = [at for at in (ratio * AROUND[0], ratio * AROUND[1]) if least * 1.02 < at < most * 0.98]
    context = context or [math.sqrt(max(least, ratio / 10) * min(most, 10 * max(least, ratio)))]
    return [*pairwise((least, *context, most))]


def _narrow(span: Span) -> bool:
    return span[1] <= max(span[0] * NARROW, 1e-4)


def _around(case: _Case, key: Key) -> dict[Of, Span]:
    """Narrow spans around what the solutions of `case` wait in a pass: for all collectives, and by level once that is known to be within some span."""
    passing, mean = case.relaxed.passing, case.mean[key]
    waits_s = {"": float(mean[WAITED])}
    for axis, level in enumerate(passing.link):
        if level:
            waits_s[level] = waits_s.get(level, 0.0) + float(mean[passing.links_waited(axis)])
    compute_s = float(mean[COMPUTE])
    return {(key, level): (seconds / compute_s / SPREAD, seconds / compute_s * SPREAD) for level, seconds in waits_s.items() if seconds > 0.0 < compute_s}


def _least_s(case: _Case, key: Key, spans: Mapping[Of, Span]) -> float:
    """What one pass takes at least on the mean of the solutions of `case`, if its waits are within `spans`."""
    relaxed = replace(case.relaxed, times={key: case.relaxed.times[key]}, spans=spans)
    return Cutting([Level(relaxed, [Sums({key: case.mean[key]}, 0.0, np.zeros(len(relaxed.rooms)))])], _nothing).most_s()


def _nothing(number: int, prices: Prices, bytes_s: np.ndarray, known_s: float, cutoff_s: float) -> Seen:
    raise AssertionError("what is met is given")
