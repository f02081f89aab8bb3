"""Compute and collectives of a rank as they share links and compute units: the model of `simulate.engine`, followed
from one wait of compute to the next.

    compute    one after the other, on the clock `now_s`; `work_s` are the seconds so far of compute and of what it
               waits for, if nothing slowed them
    streams    one for the collectives of each mesh axis that compute waits for, and one for those in the background
               (runtime.mesh); each runs its collectives in the order in which they begin
    links      collectives that run at the same time and together want more than a link has are all slowed by the same
               factor (hiding.slower)
    units      while compute runs, each collective beside it takes the share `contention` of the compute units
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.problem.hiding import LOCAL_AXIS, Load, slower

LEAST_RATE = 0.01
"""Of compute, however many collectives run beside it."""
ROUNDING = 1e-12
"""Relative: ends that are closer are the same."""


@dataclass(eq=False, slots=True)
class Sending:
    """A collective that has begun: the seconds of it that are left if nothing slows it."""

    load: Load
    left_s: float


class Streams:
    """The streams of a rank, from the begin of a pass on."""

    def __init__(self, contention: float) -> None:
        self.now_s, self.work_s = 0.0, 0.0
        self._contention = contention
        self._queues: dict[tuple[int, bool], deque[Sending]] = {}
        self._slower: dict[tuple[int, ...], list[float]] = {}  # by the numbers (id) of loads that `_loads` keeps
        self._loads: list[Load] = []

    def collective(self, part: Load, during: str = "") -> Sending:
        """Begin a collective now, in the background."""
        return self._begin(part, behind=True)

    def _begin(self, load: Load, *, behind: bool) -> Sending:
        """Begin a collective now, in the background (`behind`) or on the stream of those that compute waits for."""
        sending = Sending(load, load.seconds)
        if load.seconds > 0.0:
            self._queues.setdefault((load.axis, behind), deque()).append(sending)
        return sending

    def wait(self, begun: Sending) -> None:
        """Compute waits until a collective has ended."""
        while begun.left_s > 0.0:
            self._go_on(0.0)

    def do(self, parts: Sequence[Load], during: str = "") -> None:
        """Run collectives that compute waits for, and local copies, one after the other."""
        for load in parts:
            self.run(load)

    def run(self, load: Load) -> None:
        """A collective that compute waits for, or a local copy."""
        if load.axis == LOCAL_AXIS:
            self.compute(load.seconds)
            return
        self.work_s += load.seconds
        self.wait(self._begin(load, behind=False))

    def compute(self, seconds: float) -> None:
        """Compute for so many seconds, more where collectives run beside it."""
        self.work_s += seconds
        while seconds > 0.0:
            seconds = self._go_on(seconds)

    def _go_on(self, compute_s: float) -> float:
        """Go on to the next end of a collective, or to the end of `compute_s` of compute: the seconds of compute that
        are left. 0 seconds of compute: it waits."""
        running = [queue[0] for queue in self._queues.values() if queue]
        if not running:
            self.now_s += compute_s
            return 0.0
        slowed = self._slowed(running) if len(running) > 1 else (1.0,)
        rate = max(LEAST_RATE, 1.0 - self._contention * len(running))
        took_s = computed_s = compute_s / rate if compute_s > 0.0 else math.inf
        for sending, factor in zip(running, slowed, strict=True):
            took_s = min(took_s, sending.left_s * factor)
        for sending, factor in zip(running, slowed, strict=True):
            left_s = sending.left_s - took_s / factor
            sending.left_s = left_s if left_s > ROUNDING * sending.load.seconds else 0.0
        for queue in self._queues.values():
            if queue and queue[0].left_s <= 0.0:
                queue.popleft()
        self.now_s += took_s
        return 0.0 if took_s >= computed_s else compute_s - took_s * rate

    def _slowed(self, running: Sequence[Sending]) -> Sequence[float]:
        """The factor by which each of several collectives is slowed down by the others; alike blocks run the same ones
        together."""
        key = tuple([id(sending.load) for sending in running])
        if (found := self._slower.get(key)) is None:
            loads = [sending.load for sending in running]
            found = self._slower[key] = [slower(load, loads) for load in loads]
            self._loads += loads
        return found
