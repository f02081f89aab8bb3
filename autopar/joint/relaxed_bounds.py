"""Lower bounds of relaxed steps, by cutting planes and by cases. Called by shape_bounds and memory_bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.effort import Effort
from autopar.joint.relaxed import Key, Relaxed
from autopar.joint.relaxed_solving import Solver
from autopar.joint.wait_cases import bound_s

Choices = list[tuple[int, ...]]


def cut_s(levels: Sequence[Relaxed], cutoff_s: float, effort: Effort, met: Choices, cases: Sequence[Key] = ()) -> float:
    """A lower bound of the seconds of all mixtures of `levels`, infinite where none is possible. Ends once it reaches
    `cutoff_s`.

    `met`: known solutions of all levels, to which new ones are added. `cases`: the passes of a single level that are
    divided into cases (joint.wait_cases), if `effort` has any.
    """
    cutting = _cutting(levels, effort, met)
    keys = [key for key in cases if key in levels[0].keys] if effort.cases and levels[0].hides else []
    return _bound_s(cutting, keys, cutoff_s, effort)


def _cutting(levels: Sequence[Relaxed], effort: Effort, met: Choices) -> Cutting:
    """The dual of `levels`, of which `met` are known solutions."""
    if len(levels) > 1:  # neighbours may run again at different levels
        levels = [replace(each, chained=False) for each in levels]
    return Cutting(
        [Level(each, [each.sums(choice) for choice in met]) for each in levels],
        Solver(levels, exact=effort.cases > 0),
        met,
    )


def _bound_s(cutting: Cutting, keys: Sequence[Key], cutoff_s: float, effort: Effort) -> float:
    """The bound of `cutting`, by cases of the passes `keys` if there are any."""
    return bound_s(cutting, keys, cutoff_s, effort) if keys else cutting.bound_s(cutoff_s, effort.rounds)


def chain_s(relaxed: Relaxed, effort: Effort) -> tuple[float, float]:
    """A lower bound of the seconds of all blocks of a chain (joint.block_chains) before what it loses at its ends, and
    that loss. As `cut_s` infinite where nothing is possible."""
    cutting = _cutting([replace(relaxed, chained=True)], effort, [])
    least_s = _bound_s(cutting, (), math.inf, effort)
    return least_s + cutting.lost_s, cutting.lost_s
