"""What waits for what when places run a schedule, found once for all times of its stages; how long that takes.

A place runs its actions in order, each when what it needs has arrived. It sends what an action has made when it has ended, one thing after
the other over its link, forward and backward, while it computes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.errors import PlanError
from autopar.pipeline.orders import Action, StageTime

KINDS = "FBIW"
FORWARD, WHOLE, INPUTS, WEIGHTS = range(4)
AT_ONCE = 512  # ways to time a step that are looked at side by side: more of them leave the cache


class Step(NamedTuple):
    """One action: its place, its stage, its kind as an index of KINDS; the `hop` over which it sends what it has made, from that stage to
    the next or back (-1: none); the positions in Flow.steps of what has to be done on its own place, and of what has to arrive from others."""

    place: int
    stage: int
    kind: int
    hop: int
    here: tuple[int, ...]
    sent: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Flow:
    """All actions of all `places`, each behind all that it waits for."""

    places: int
    steps: list[Step]

    @staticmethod
    def of(lines: Sequence[Sequence[Action]], places: Sequence[int]) -> Flow:
        """Of the actions of each place, in order, where stage i is on `places[i]`. Raises PlanError where they wait for each other."""
        waits = _Waits(lines, places)
        steps: list[Step] = []
        at = [0] * len(lines)
        moved = True
        while moved:
            moved = False
            for place, line in enumerate(lines):
                while at[place] < len(line):
                    action, stage, micro = line[at[place]]
                    kind = KINDS.index(action)
                    needs = waits.of(kind, stage, micro)
                    if needs is None:
                        break
                    waits.done(kind, stage, micro, len(steps))
                    steps.append(Step(place, stage, kind, waits.hop(kind, stage), *needs))
                    at[place] += 1
                    moved = True
        if len(steps) < sum(map(len, lines)):
            raise PlanError(f"the schedule waits for itself: {[line[i] for line, i in zip(lines, at, strict=True) if i < len(line)]}")
        return Flow(len(lines), steps)

    def ends_s(self, times: Sequence[StageTime]) -> list[float]:
        """Seconds until each place is done, for the times of each stage."""
        took = [[time.of(kind) for kind in KINDS] for time in times]
        clock, free = [0.0] * self.places, [0.0] * self.places  # when a place, and its link, is free
        done: list[float] = []
        arrived: list[float] = []
        for place, stage, kind, hop, here, sent in self.steps:
            end = clock[place]
            for index in here:
                if done[index] > end:
                    end = done[index]
            for index in sent:
                if arrived[index] > end:
                    end = arrived[index]
            clock[place] = end = end + took[stage][kind]
            done.append(end)
            if hop >= 0 and times[hop].send_s:
                free[place] = end = max(free[place], end) + times[hop].send_s
            arrived.append(end)
        return clock

    def ends_all_s(self, took_s: np.ndarray, send_s: np.ndarray) -> np.ndarray:
        """The same for many ways at once, [places, ways]: of actions [kinds, stages, ways] and sends [stages, ways]."""
        ways = range(0, took_s.shape[2], AT_ONCE)
        return np.concatenate([self._ends_all_s(took_s[..., way:way + AT_ONCE], send_s[:, way:way + AT_ONCE]) for way in ways], axis=1)

    def _ends_all_s(self, took_s: np.ndarray, send_s: np.ndarray) -> np.ndarray:
        clock, free = ([np.zeros(took_s.shape[2])] * self.places for _ in range(2))
        sends = send_s.max(axis=1, initial=0.0) > 0.0
        done: list[np.ndarray] = []
        arrived: list[np.ndarray] = []
        for place, stage, kind, hop, here, sent in self.steps:
            end = clock[place]
            for index in here:
                end = np.maximum(end, done[index])
            for index in sent:
                end = np.maximum(end, arrived[index])
            clock[place] = end = end + took_s[kind, stage]
            done.append(end)
            if hop >= 0 and sends[hop]:
                free[place] = end = np.maximum(free[place], end) + send_s[hop]
            arrived.append(end)
        return np.array(clock)


_Needs = tuple[tuple[int, ...], tuple[int, ...]]


class _Waits:
    """Which actions are done, as positions in Flow.steps by kind, stage and microbatch (-1: not yet): hundreds of thousands are asked for."""

    def __init__(self, lines: Sequence[Sequence[Action]], places: Sequence[int]) -> None:
        micro = 1 + max(action.microbatch for line in lines for action in line)
        self._at = [[[-1] * micro for _ in places] for _ in KINDS]
        self._last = len(places) - 1
        self._hops = [i < self._last and places[i] != places[i + 1] for i in range(len(places))]  # whether the next stage is on another place

    def done(self, kind: int, stage: int, micro: int, position: int) -> None:
        """Notes an action; of a backward in two parts the first sends, as a whole one does."""
        self._at[WHOLE if kind == INPUTS else kind][stage][micro] = position

    def hop(self, kind: int, stage: int) -> int:
        """Over which hop an action sends."""
        back = stage - 1 if stage and kind in (WHOLE, INPUTS) else -1
        hop = stage if kind == FORWARD else back
        return hop if hop >= 0 and self._hops[hop] else -1

    def of(self, kind: int, stage: int, micro: int) -> _Needs | None:
        """What an action waits for on its own place, and from others; None while some of it is not done."""
        if kind == FORWARD:
            return self._arriving((), self._at[FORWARD][stage - 1][micro], stage - 1) if stage else ((), ())
        own = self._at[WHOLE if kind == WEIGHTS else FORWARD][stage][micro]
        if own < 0:
            return None
        if kind == WEIGHTS or stage == self._last:
            return (own,), ()
        return self._arriving((own,), self._at[WHOLE][stage + 1][micro], stage)

    def _arriving(self, own: tuple[int, ...], position: int, hop: int) -> _Needs | None:
        if position < 0:
            return None
        return (own, (position,)) if self._hops[hop] else ((*own, position), ())


def finishes_s(lines: Sequence[Sequence[Action]], times: Sequence[StageTime], places: Sequence[int]) -> list[float]:
    """Seconds until each place is done with the actions of `lines`, where stage i is on `places[i]`."""
    return Flow.of(lines, places).ends_s(times)


def step_s(lines: Sequence[Sequence[Action]], times: Sequence[StageTime], places: Sequence[int]) -> float:
    """Seconds until the last place is done."""
    return max(finishes_s(lines, times, places))
