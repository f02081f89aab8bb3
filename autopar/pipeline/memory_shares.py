"""How several stages on one place share its memory: in proportion to the bytes that they hold, and where these exceed
the place, with the same share of each stage's blocks run again. Called by pipeline.filling, and by autopar.joint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Need(NamedTuple):
    """Bytes of a stage that it holds, the part of them that is `freed` if all its blocks run again, and those that
    exist only while a piece runs (`live`), or runs and runs again (`live_again`)."""

    held: float
    freed: float
    live: float
    live_again: float


class Split(NamedTuple):
    """For the stages of one place: the share of each in the bytes that they hold together, and the bytes that exist
    only while a piece of one of them runs (`live`)."""

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
    """Each value as a share of their sum; equal shares where that is 0."""
    whole = sum(values)
    return [value / whole for value in values] if whole > 0.0 else [1 / len(values)] * len(values)


def rooms(needs: Sequence[Need], limit_bytes: float) -> list[tuple[float, float]]:
    """For each stage of one place: its limit in bytes, and the part of it that is reserved for bytes that exist only
    while a piece runs. All stages share that part, since one runs at a time."""
    if len(needs) == 1:
        return [(limit_bytes, 0.0)]
    found = split(needs, limit_bytes)
    return [(max(0.0, limit_bytes - found.live) * share + found.live, found.live) for share in found.shares]


class Spent(NamedTuple):
    """What a stage takes: seconds of a microbatch, bytes that it holds, and bytes that exist only while a piece of it
    runs."""

    seconds: float
    held: float
    live: float


class May(NamedTuple):
    """What a stage may take: seconds of a microbatch and bytes, `spare` of which are reserved for those that exist only
    while a piece runs."""

    seconds: float
    nbytes: float
    spare: float = 0.0


class Budgets:
    """What each stage may take of the time and memory of its place, given what the stages before it on that place have
    taken. `at`: the place of each stage; `limits`: the bytes of that place; `whole`: the memory that a stage there
    would need for the whole model."""

    def __init__(self, at: Sequence[int], limits: Sequence[float], whole: Sequence[Need]) -> None:
        self.before: list[list[int]] = [
            [other for other in range(stage) if at[other] == place] for stage, place in enumerate(at)
        ]
        self.limits, count = limits, len(at)
        # per stage: reserved bytes (live); the number of stages of its place up to it (time); and the share of these in
        # the other bytes of the place (memory)
        lives, times, shares = (np.zeros(count) for _ in range(3))
        for place in dict.fromkeys(at):
            mine = [stage for stage, other in enumerate(at) if other == place]
            even = [
                need._replace(held=need.held / count, freed=need.freed / count)
                for need in (whole[stage] for stage in mine)
            ]
            found = split(even, limits[mine[0]])
            lives[mine], times[mine], shares[mine] = found.live, np.arange(1, len(mine) + 1), np.cumsum(found.shares)
            shares[mine[-1]] = 1.0
        self.live, self.time, self.memory = lives.tolist(), times.tolist(), shares.tolist()

    def of(self, stage: int, limit_s: float, spent: Sequence[Spent]) -> May:
        """What `stage` may take where the stages of a place may take `limit_s` each on average, and `spent` is what
        each stage before it has taken."""
        before, limit, live = (
            [spent[other] for other in self.before[stage]],
            self.limits[stage],
            self.live[stage],
        )
        if not before and self.memory[stage] == 1.0:
            return May(limit_s, limit)
        spare = max([live, *(other.live for other in before)])
        held = (limit - spare) * self.memory[stage] - sum(other.held for other in before)
        return May(limit_s * self.time[stage] - sum(other.seconds for other in before), held + spare, spare)

    def mean_s(self, seconds: Sequence[float]) -> float:
        """The largest average of the seconds of a stage and all stages before it on its place."""
        return max(
            (own + sum(seconds[other] for other in self.before[stage])) / self.time[stage]
            for stage, own in enumerate(seconds)
        )
