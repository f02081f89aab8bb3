"""The memory of a place over time: its bytes (autopar.memory) at the times that the simulation finds. Called by
simulate.step."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.memory.place import Level

FEW_ACTIONS = 8  # a place with more of them has only two points for each
FINE_POINTS = 32  # points for each action of a place with few


def over_time(levels: Sequence[Level], times: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes) whenever the bytes change, from second 0 on, at which the bytes at rest are there. `times`:
    begin and end of the action of each of `levels`.

    Within an action the bytes are taken to change linearly from begin to end, with the peak in between. Of a place with
    many actions only the peak and the end of each are listed.
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
