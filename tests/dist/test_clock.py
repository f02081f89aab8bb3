"""The clock of a calibration on real ranks: windows, runs in common, and what ranks compute however much else the
machine does."""

from __future__ import annotations

import statistics
import time

from autopar.calibrate.clock import Clock
from autopar.runtime.launch import launch


def _measured() -> dict[str, float]:
    def work() -> int:
        return sum(range(20000))

    wall, busy = Clock("cpu", 0.02, 3), Clock("cpu", 0.05, 5, cores=1)
    # in turns: how fast a core is changes with what its neighbours do
    pairs = [(busy.apart_s(work), busy.alone_s(work)) for _ in range(3)]
    return {
        "apart": wall.apart_s(work),
        "together": wall.together_s(work),
        "alone": wall.alone_s(work),
        "sleep": wall.runs_s(lambda: time.sleep(0.05)),
        "between": wall.between_s(lambda: time.sleep(0.02), lambda _: time.sleep(0.01)),
        "busy": statistics.median(apart for apart, _ in pairs),
        "times": statistics.median(apart / alone for apart, alone in pairs),
        "busy together": busy.together_s(work),
        "busy sleep": busy.runs_s(lambda: time.sleep(0.05)),
    }


def test_seconds_of_the_wall_and_of_what_ranks_compute() -> None:
    first, second = launch(_measured, 2)
    assert {name: second[name] for name in first} == first  # all ranks are told the same
    assert 0 < first["apart"] < 0.5 and 0 < first["together"] < 0.5 and 0 < first["alone"] < 0.5
    assert 0.015 < first["between"] < 0.04  # without what was computed with the result
    assert first["sleep"] >= 0.05 and first["busy sleep"] < 0.04  # who waits computes nothing
    assert 1.2 < first["times"] < 3.5  # two ranks on one core
    assert first["busy"] > first["apart"] * 0.1
