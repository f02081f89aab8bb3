"""Memory over time: what a place holds (autopar.memory), at the times at which the simulation says that things run."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.memory.place import Level

FINE_POINTS = 32  # points of one action where there are at most FEW_ACTIONS
FEW_ACTIONS = 8


def over_time(levels: Sequence[Level], times: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes) whenever the bytes change, from 0 on: what rests is there before the first action. `times` is
    when each of `levels` begins and ends.

    Within an action the bytes are taken to change linearly from begin to end, with the peak in between; where there are
    many actions, only peak and end are listed.
    """
    found = [(0.0, levels[0].begin)] if levels else []
    for level, (begin, end) in zip(levels, times, strict=True):
        points = FINE_POINTS if len(levels) <= FEW_ACTIONS else 1
        fullest = min(points - 1, int(level.at * points))
        for index in range(points):
            share = index / points
            nbytes = level.most if index == fullest else level.begin + share * (level.end - level.begin)
            found.append((begin + share * (end - begin), nbytes))
        found.append((end, level.end))
    return tuple(point for index, point in enumerate(found) if index == 0 or point[1] != found[index - 1][1])
