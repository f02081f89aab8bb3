"""Cuts of a model into stages whose lengths follow a profile: other beginnings of the local search over cuts
(pipeline.cut_search) than even stages.

With few microbatches a pipeline fills sooner behind stages that get longer from the first one on, and drains sooner
where the last ones are shorter; or, where the last stage has the loss and little else, one of the last may be longer.
From an even cut that is many moves away, the first of which gain nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

FIRST = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Lengths of the first stage, where those in the middle have 1."""

RISES = (0.25, 0.5, 0.75)
"""Shares of the stages over which lengths rise from the first one to those in the middle."""

LAST = (0.5, 0.75, 1.0, 1.5)
"""Lengths of the last stage; they change from those in the middle on over the last quarter."""

FALL = 0.75
"""From this share of the stages on lengths change to that of the last one."""


def profiles(stages: int) -> np.ndarray:
    """[profiles, stages]: relative lengths of the stages of each profile."""
    at = (np.arange(stages) + 0.5) / stages
    return np.array(
        [
            np.interp(at, (0.0, rise, FALL, 1.0), (first, 1.0, 1.0, last))
            for first, rise, last in itertools.product(FIRST, RISES, LAST)
        ]
    )


def ramped(seconds: Sequence[Sequence[float]], ends: Sequence[int]) -> list[tuple[int, ...]]:
    """The distinct bounds of cuts by all profiles. `seconds`: for each stage, those of all pieces on its place; `ends`:
    the pieces, in order, that a stage can begin with, but for the first. Each bound is the one of `ends` at which the
    stages before it come nearest to their share. Empty where there are fewer `ends` than bounds."""
    bounds = len(seconds) - 1
    if len(ends) < bounds:
        return []
    paces = 1.0 / np.array([max(sum(own), 1e-12) for own in seconds])  # a fast place takes more
    shares = profiles(len(seconds)) * paces
    wanted = (shares.cumsum(1) / shares.sum(1, keepdims=True))[:, :-1]
    pieces = np.array(seconds[0])
    behind = (pieces.cumsum() / max(float(pieces.sum()), 1e-12))[np.array(ends) - 1]
    found: dict[tuple[int, ...], None] = {}
    for row in wanted:
        at, chosen = -1, []
        for number, share in enumerate(row):
            nearest = int(np.abs(behind - share).argmin())
            at = min(max(nearest, at + 1), len(ends) - bounds + number)
            chosen.append(ends[at])
        found[tuple(chosen)] = None
    return list(found)
