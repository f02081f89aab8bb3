"""The fastest of the corners of seconds against bytes (problem.remat_frontier), of which as few are priced as that
takes. Called by joint.kept_results.

A step gets shorter as blocks keep more, until memory has no room for that and more of them have to run again: it mostly
has one minimum along the corners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.problem.remat_frontier import Point

HALVINGS = 2
"""Times that the corners are halved before the search goes to the fastest of those between them."""

ALIKE = 1e-3
"""Relative: where the slowest step is slower than the fastest by no more than this, and there is room for more than the
fastest keeps, it matters little what is kept."""


def descend(
    ends: Sequence[Point], amid: Callable[[Point, Point], Point | None], step_s: Callable[[Point], float]
) -> None:
    """Price corners from `ends`, the fewest bytes first, down to the fastest. `step_s` gives the seconds of a step,
    infinite where a corner does not fit, as then none does that keeps more; it is called once for each. `amid` gives a
    corner between two (None: there is none)."""
    corners, steps_s = [*ends], [step_s(corner) for corner in ends]

    def split(at: int) -> bool:
        """Price a corner behind number `at`, up to the next one. Whether there is one that may fit."""
        if not 0 <= at < len(corners) - 1 or math.isinf(steps_s[at]):
            return False
        found = amid(corners[at], corners[at + 1])
        if found is None:
            return False
        corners.insert(at + 1, found)
        steps_s.insert(at + 1, step_s(found))
        return True

    for _ in range(HALVINGS):
        for at in reversed(range(len(corners) - 1)):
            split(at)
    while True:
        at = steps_s.index(min(steps_s))
        beside = steps_s[max(0, at - 1) : at + 2]
        known = [step_s for step_s in steps_s if step_s < math.inf]
        if math.inf not in beside and len(known) > 2 and max(known) <= min(known) * (1 + ALIKE):
            return
        if not any([split(at), split(at - 1)]):
            return
