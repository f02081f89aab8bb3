"""The largest batch or sequence that fits, for will_it_fit. Peaks at other sizes need no new capture, because every
size in the graph is a formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable


def largest(peak_bytes: Callable[[int], float], limit_bytes: float, step: int, most: int) -> int:
    """The largest multiple of `step`, at most `most`, at which `peak_bytes` stays within the limit; 0 where not even
    `step` does.

    `peak_bytes` must not fall with the size. The largest size of all is looked at first, since small models fit at any.
    The peak is piecewise linear, so then a secant step is tried (where the line through the peaks of both bounds meets
    the limit), then the size next to the lower bound, then the middle.
    """
    known: dict[int, float] = {}

    def fits(steps: int) -> bool:
        known[steps] = peak_bytes(steps * step)
        return known[steps] <= limit_bytes

    top = most // step
    if top < 1 or not fits(1):
        return 0
    if fits(top):
        return top * step
    low, high = 1, 2
    while high < top and fits(high):
        grown = max(known[high] - known[low], 1.0) / (high - low)
        low, high = high, min(top, max(2 * high, high + int((limit_bytes - known[high]) / grown)))
    for way in itertools.cycle(("line", "neighbour", "middle")):
        if high - low < 2:
            return low * step
        slope = (high - low) / (known[high] - known[low]) if high in known else 1.0 / max(known[low], 1.0)
        line = low + int((limit_bytes - known[low]) * slope)
        at = {"line": min(max(line, low + 1), high - 1), "neighbour": low + 1, "middle": (low + high) // 2}[way]
        low, high = (at, high) if fits(at) else (low, at)
    raise AssertionError("the cycle has no end")
