"""How long a schedule takes where places share cores: while some wait, the others are faster.

speed of each of k places at work, of n in all = min(alone, n / k), where all at work have speed 1 (Device.alone)
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.makespan import KINDS, Flow
from autopar.pipeline.orders import StageTime


def ends_s(flow: Flow, times: Sequence[StageTime], alone: float) -> list[float]:
    """As `Flow.ends_s`, with the speeds above, on devices where nothing overlaps sums of gradients."""
    lines = [[index for index, step in enumerate(flow.steps) if step.place == place] for place in range(flow.places)]
    done: dict[int, float] = {}
    arrived: dict[int, float] = {}
    at, ends, free, left = [0] * flow.places, [0.0] * flow.places, [0.0] * flow.places, dict[int, float]()
    now = 0.0  # `left`: seconds of the running action of each place at speed 1; `free`: when its link is
    while len(done) < len(flow.steps):
        later = []
        for place, line in enumerate(lines):
            if place in left or at[place] == len(line):
                continue
            step = flow.steps[line[at[place]]]
            if any(index not in done for index in (*step.here, *step.sent)):
                continue
            ready = max((arrived[index] for index in step.sent), default=0.0)
            if ready <= now:
                left[place] = times[step.stage].of(KINDS[step.kind]) + times[step.stage].gathering.longer_s * step.first
            else:
                later.append(ready)
        speed = min(alone, flow.places / len(left)) if left else 1.0
        took = min([*(seconds / speed for seconds in left.values()), *(ready - now for ready in later)])
        now += took
        for place in list(left):
            left[place] -= took * speed
            if left[place] <= 1e-15 + 1e-9 * took:
                del left[place]
                index = lines[place][at[place]]
                done[index] = arrived[index] = ends[place] = now
                hop = flow.steps[index].hop
                if hop >= 0 and times[hop].send_s:
                    free[place] = arrived[index] = max(free[place], now) + times[hop].send_s
                at[place] += 1
    for stage, place in {step.stage: step.place for step in flow.steps}.items():
        ends[place] += times[stage].summing.late_s
    return ends
