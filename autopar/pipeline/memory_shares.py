"""How several stages on one place share its memory: in proportion to what they hold, and where that is too much for the
place, with the same share of each stage's blocks run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Need(NamedTuple):
    """Bytes of a stage: what it holds, how much less that is if all its blocks run again (`freed`), and what exists
    only while a piece runs (`live`) or runs again (`live_again`)."""

    held: float
    freed: float
    live: float
    live_again: float


class Split(NamedTuple):
    """For the stages of one place: the share of each in what they hold together, and the bytes that exist only while
    one of them runs (`live`)."""

    shares: list[float]
    live: float


def split(needs: Sequence[Need], limit_bytes: float) -> Split:
    """How the stages of one place share `limit_bytes`: in proportion to what they hold; if that is too much, with the
    same share of each stage's blocks run again."""
    held, freed = sum(need.held for need in needs), sum(need.freed for need in needs)
    live = max(need.live for need in needs)
    if held + live <= limit_bytes or not freed:
        return Split(_parts([need.held for need in needs]), live)
    live = max(live, *(need.live_again for need in needs))
    again = min(1.0, (held + live - limit_bytes) / freed)
    return Split(_parts([need.held - again * need.freed for need in needs]), live)


def _parts(values: Sequence[float]) -> list[float]:
    whole = sum(values)
    return [value / whole for value in values] if whole > 0.0 else [1 / len(values)] * len(values)


def rooms(needs: Sequence[Need], limit_bytes: float) -> list[tuple[float, float]]:
    """For each stage of one place: its limit in bytes, and the part of it that is reserved for what exists only while a
    stage runs, which all stages share."""
    if len(needs) == 1:
        return [(limit_bytes, 0.0)]
    found = split(needs, limit_bytes)
    return [(max(0.0, limit_bytes - found.live) * share + found.live, found.live) for share in found.shares]


class Spent(NamedTuple):
    """What a stage takes: seconds, bytes that it holds, and bytes that exist only while it runs."""

    seconds: float
    held: float
    live: float


class May(NamedTuple):
    """What a stage may take: seconds and bytes, of which `spare` bytes are reserved for what exists only while a stage
    runs."""

    seconds: float
    nbytes: float
    spare: float = 0.0


class Budgets:
    """How much time and memory of its place each stage may take, given what the stages before it on that place have
    taken.

    `at` is the place of each stage, `limits` the bytes of that place, `whole` what a stage there would take that had
    all of the model.
    """

    def __init__(self, at: Sequence[int], limits: Sequence[float], whole: Sequence[Need]) -> None:
        self.before: list[list[int]] = [
            [other for other in range(stage) if at[other] == place] for stage, place in enumerate(at)
        ]
        self.limits, count = limits, len(at)
        # per stage: reserved bytes; and cumulated over the stages of its place up to it, its time in units of a stage
        # and its share of the bytes
        self.live, self.time, self.memory = (np.zeros(count) for _ in range(3))
        for place in dict.fromkeys(at):
            mine = [stage for stage, other in enumerate(at) if other == place]
            even = [
                need._replace(held=need.held / count, freed=need.freed / count)
                for need in (whole[stage] for stage in mine)
            ]
            found = split(even, limits[mine[0]])
            self.live[mine], self.time[mine], self.memory[mine] = (
                found.live,
                np.arange(1, len(mine) + 1),
                np.cumsum(found.shares),
            )
            self.memory[mine[-1]] = 1.0

    def of(self, stage: int, limit_s: float, spent: Sequence[Spent]) -> May:
        """What `stage` may take if the stages of a place may take `limit_s` each on average, and those before it have
        `spent` what they did."""
        before, limit, live = (
            [spent[other] for other in self.before[stage]],
            self.limits[stage],
            float(self.live[stage]),
        )
        if not before and self.memory[stage] == 1.0:
            return May(limit_s, limit)
        spare = max([live, *(other.live for other in before)])
        held = (limit - spare) * float(self.memory[stage]) - sum(other.held for other in before)
        return May(limit_s * float(self.time[stage]) - sum(other.seconds for other in before), held + spare, spare)

    def mean_s(self, seconds: Sequence[float]) -> float:
        """The largest average of the seconds of a stage and all stages before it on its place."""
        return max(
            (own + sum(seconds[other] for other in self.before[stage])) / float(self.time[stage])
            for stage, own in enumerate(seconds)
        )
