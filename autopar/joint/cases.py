"""Bounds by cases of how long passes wait for collectives: what is in the background moves under waits and under compute evenly, which prices only know where the
one is about so many times as long as the other (joint.relaxed). The case of which least is proven is split, in the pass where that may prove most, until there is
nothing to gain.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.cutting import ROUNDS, Cutting, Level
from autopar.joint.relaxed import ALL, Key, Relaxed, Span
from autopar.problem.passing import COMPUTE, WAITED

CASES = 256
"""So many at most of one shape."""

LIMIT_S = 60.0
"""So many seconds at most for the cases of one shape: where memory is short, one may take minutes and prove no more."""

NARROW = 1.1
"""Spans from less to so many times as much are not split further."""

AROUND = 0.85, 1.2
"""Where a span is split: at so many times what the solutions have that are met in it."""


@dataclass(order=True)
class _Case:
    """What is proven of `relaxed`, with what its passes take on the mean of the solutions that say no more is possible."""

    bound_s: float
    number: int
    relaxed: Relaxed = field(compare=False)
    mean: dict[Key, np.ndarray] = field(compare=False)


def bound_s(cutting: Cutting, keys: Sequence[Key], cutoff_s: float) -> float:
    """Seconds that no solution of the one level of `cutting` beats, by cases of the passes `keys`; no more than `cutoff_s` is asked for."""
    level = cutting.levels[0]
    open_, made = [_case(cutting, keys, cutoff_s, 0)], 1
    deadline = time.perf_counter() + LIMIT_S
    while open_[0].bound_s < cutoff_s and made < CASES and time.perf_counter() < deadline:
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


def _split(case: _Case, keys: Sequence[Key]) -> tuple[Key, list[Span]] | None:
    """The pass in which most may be hidden under waits that is not, and the spans that its own is taken apart into; None where all are narrow."""
    relaxed, found = case.relaxed, list[tuple[float, Key, list[Span]]]()
    for key in keys:
        compute_s, waited_s = float(case.mean[key][COMPUTE]), float(case.mean[key][WAITED])
        least, most = relaxed.spans.get(key, ALL)
        if waited_s <= 0.0 or compute_s <= 0.0 or most <= max(least * NARROW, 1e-4):
            continue
        ratio = waited_s / compute_s
        inner = [at for at in (ratio * AROUND[0], ratio * AROUND[1]) if least * 1.02 < at < most * 0.98]
        inner = inner or [math.sqrt(max(least, ratio / 10) * min(most, 10 * max(least, ratio)))]
        wide = min(most, 2.0 * ratio) - least  # what moves under waits is known as well as their share
        found.append((relaxed.times[key] * wide * relaxed.passing.background_s(case.mean[key]), key, [*pairwise((least, *inner, most))]))
    return max(found, key=lambda each: each[0])[1:] if found else None
