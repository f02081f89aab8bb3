"""How long a schedule takes where places share cores: while some wait, the others are faster.

    speed of each of k places at work, of n in all = min(alone, n / k), where all at work have speed 1 (Device.alone)
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.pipeline.orders import Action, Arrivals, StageTime


def finishes_s(lines: Sequence[Sequence[Action]], times: Sequence[StageTime], places: Sequence[int], alone: float) -> list[float]:
    """As `orders.finishes_s`, with the speeds above."""
    count = len(lines)
    arrivals = Arrivals(times, places)
    at, ends, left = [0] * count, [0.0] * count, dict[int, float]()  # `left`: seconds of the running action of each place at speed 1
    now = 0.0
    while any(at[place] < len(line) for place, line in enumerate(lines)):
        later = []
        for place, line in enumerate(lines):
            if place in left or at[place] == len(line):
                continue
            ready = arrivals.ready_s(line[at[place]])
            if ready is not None and ready <= now:
                action = line[at[place]]
                left[place] = times[action.stage].of(action.kind)
            elif ready is not None:
                later.append(ready)
        if not left and not later:
            raise PlanError(f"the schedule waits for itself: {[line[i] for line, i in zip(lines, at, strict=True) if i < len(line)]}")
        speed = min(alone, count / len(left)) if left else 1.0
        took = min([*(seconds / speed for seconds in left.values()), *(ready - now for ready in later)])
        now += took
        for place in list(left):
            left[place] -= took * speed
            if left[place] <= 1e-15 + 1e-9 * took:
                del left[place]
                ends[place] = now
                arrivals.ended(lines[place][at[place]], now)
                at[place] += 1
    return ends
