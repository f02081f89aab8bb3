"""Branch and bound over how long passes wait for collectives. Called by shape_bounds.

Background collectives overlap compute and waits evenly, and slow down waits for links that they share. The linear
bounds (joint.price_polytope) can only use this if the ratio of waiting to compute in a pass is known to lie in a span.
So the solutions are divided by these ratios: the case with the lowest bound is split, at the pass and level of links
where a narrow span would raise the bound most, until nothing is gained.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.effort import MOST_ROUNDS, Effort
from autopar.joint.relaxed import ALL, Key, Relaxed, Span, Sums
from autopar.joint.relaxed_solving import Seen
from autopar.problem.pass_quantities import COMPUTE, WAITED

LIMIT_S = 60.0
"""Seconds at most for all cases of one shape: where memory is short one case can take minutes, and hardly raises the
bound."""

NARROW = 1.1
"""Spans whose ends differ by less than this factor are not split."""

AROUND = 0.85, 1.2
"""Factors on the mean ratio of the solutions of a case: a span is split there, on either side of the ratio."""

SPREAD = 1.01
"""Factor: half the width of the narrow spans by which the gain of a split is estimated."""

LEAST_GAIN = 1e-5
"""Relative to its bound: a case is not split for a smaller estimated gain."""

WaitKey = tuple[Key, str]
"""A pass, and the level of links that its waits use ("": all collectives)."""


@dataclass(order=True)
class _Case:
    """The bound of the solutions within the spans of `relaxed`. `mean`: the quantities of its passes, averaged over the
    solutions that keep the bound from being higher, with their weights in the linear program."""

    bound_s: float
    number: int
    relaxed: Relaxed = field(compare=False)
    mean: dict[Key, np.ndarray] = field(compare=False)


def bound_s(cutting: Cutting, keys: Sequence[Key], cutoff_s: float, effort: Effort) -> float:
    """A lower bound of the seconds of all solutions of the only level of `cutting`, by at most `effort.cases` cases of
    the passes `keys`. Ends once the bound reaches `cutoff_s`, or at `effort.ends_at`."""
    level = cutting.levels[0]
    open_, made = [_case(cutting, keys, cutoff_s, 0)], 1
    deadline = min(effort.ends_at, time.monotonic() + LIMIT_S)
    while open_[0].bound_s < cutoff_s and made < effort.cases and time.monotonic() < deadline:
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
    """The case of the spans of `cutting`'s only level."""
    level = cutting.levels[0]
    proven_s = cutting.bound_s(cutoff_s, MOST_ROUNDS)
    mean = {key: np.zeros(level.relaxed.passing.width + 1) for key in keys}
    # the solution at the last prices has no weight yet
    for weight, sums in zip(cutting.weights, level.met, strict=False):
        for key in keys:
            mean[key] += weight * level.relaxed.pass_of(sums, key)
    return _Case(proven_s, number, level.relaxed, mean)


def _split(case: _Case, keys: Sequence[Key]) -> tuple[WaitKey, list[Span]] | None:
    """What to split, and into which spans: in the pass whose bound rises most if all its ratios were known, the level
    whose ratio alone raises it most. None where that gains nothing, or all spans are narrow."""
    gains = [
        (
            _least_s(case, key, {**case.relaxed.spans, **_around(case, key)}) - _least_s(case, key, case.relaxed.spans),
            key,
        )
        for key in keys
    ]
    for gain_s, key in sorted(gains, reverse=True):
        if gain_s <= LEAST_GAIN * case.bound_s:
            return None
        open_ = {of: span for of, span in _around(case, key).items() if not _narrow(case.relaxed.spans.get(of, ALL))}
        if open_:
            of = max(open_, key=lambda of: _least_s(case, key, {**case.relaxed.spans, of: open_[of]}))
            return of, _parts(case.relaxed.spans.get(of, ALL), sum(open_[of]) / 2)
    return None


def _parts(span: Span, ratio: float) -> list[Span]:
    """`span` divided at AROUND times `ratio`, so that one part is around it; at one point where both are outside."""
    least, most = span
    points = [at for at in (ratio * AROUND[0], ratio * AROUND[1]) if least * 1.02 < at < most * 0.98]
    points = points or [math.sqrt(max(least, ratio / 10) * min(most, 10 * max(least, ratio)))]
    return [*pairwise((least, *points, most))]


def _narrow(span: Span) -> bool:
    """Whether a span is too narrow to be split."""
    return span[1] <= max(span[0] * NARROW, 1e-4)


def _around(case: _Case, key: Key) -> dict[WaitKey, Span]:
    """Narrow spans around the mean ratios of a pass in the solutions of `case`: of all collectives (""), and of those
    on each level's links."""
    passing, mean = case.relaxed.passing, case.mean[key]
    waits_s = {"": float(mean[WAITED])}
    for axis, level in enumerate(passing.link):
        if level:
            waits_s[level] = waits_s.get(level, 0.0) + float(mean[passing.links_waited(axis)])
    compute_s = float(mean[COMPUTE])
    return {
        (key, level): (seconds / compute_s / SPREAD, seconds / compute_s * SPREAD)
        for level, seconds in waits_s.items()
        if seconds > 0.0 < compute_s
    }


def _least_s(case: _Case, key: Key, spans: Mapping[WaitKey, Span]) -> float:
    """The lower bound of the seconds of one pass, for the mean quantities of the solutions of `case`, if its ratios are
    within `spans`."""
    relaxed = replace(case.relaxed, times={key: case.relaxed.times[key]}, spans=spans, chained=False)
    return Cutting(
        [Level(relaxed, [Sums({key: case.mean[key]}, 0.0, np.zeros(len(relaxed.rooms)))])], _nothing
    ).most_s()


def _nothing(*asked: object) -> Seen:
    """The `solve` of a Cutting whose only solution is given."""
    raise AssertionError("no Problem is solved: the only solution is given")
