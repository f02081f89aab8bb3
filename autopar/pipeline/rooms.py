"""How much of the memory of its place each of several stages has: in proportion to what they take, and where that is too much, with the same share of each run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Need(NamedTuple):
    """Bytes that a stage takes: in all, how much less where all of it is run again, and of what is there only while it runs, which is no part of both, and while it is run again."""

    held: float
    freed: float
    live: float
    live_again: float


class Split(NamedTuple):
    """Of the stages of one place the share of what these hold together, and bytes of what is there only while one of them runs."""

    shares: list[float]
    live: float


def split(needs: Sequence[Need], limit_bytes: float) -> Split:
    """How stages that take `needs` share `limit_bytes`."""
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
    """Bytes that each of the stages of one place has of `limit_bytes`, and how many of them it leaves for what is there only while a stage runs, of which all have the same."""
    if len(needs) == 1:
        return [(limit_bytes, 0.0)]
    found = split(needs, limit_bytes)
    return [(max(0.0, limit_bytes - found.live) * share + found.live, found.live) for share in found.shares]


class Spent(NamedTuple):
    """Seconds of a stage, bytes that it holds, and beside these bytes of what is there only while it runs."""

    seconds: float
    held: float
    live: float


class May(NamedTuple):
    """Seconds and bytes that a stage may take, and how many of these it leaves for what is there only while a stage runs."""

    seconds: float
    nbytes: float
    spare: float = 0.0


class Budgets:
    """How much of the time and of the memory of its place a stage may have, where those before it on the same place have left some or taken more than their part. `at` has the
    place of each stage, `limits` its bytes, `whole` what a stage would take that were all of the model."""

    def __init__(self, at: Sequence[int], limits: Sequence[float], whole: Sequence[Need]) -> None:
        self.before: list[list[int]] = [[other for other in range(stage) if at[other] == place] for stage, place in enumerate(at)]
        self.limits, count = limits, len(at)
        self.live, self.time, self.memory = (np.zeros(count) for _ in range(3))  # of stages and all before them on their place the seconds, in stages, and the share of bytes
        for place in dict.fromkeys(at):
            mine = [stage for stage, other in enumerate(at) if other == place]
            even = [need._replace(held=need.held / count, freed=need.freed / count) for need in (whole[stage] for stage in mine)]
            found = split(even, limits[mine[0]])
            self.live[mine], self.time[mine], self.memory[mine] = found.live, np.arange(1, len(mine) + 1), np.cumsum(found.shares)
            self.memory[mine[-1]] = 1.0

    def of(self, stage: int, limit_s: float, spent: Sequence[Spent]) -> May:
        """What `stage` may take where stages take `limit_s` on the mean of their place, and those before it have `spent` so much."""
        before, limit, live = [spent[other] for other in self.before[stage]], self.limits[stage], float(self.live[stage])
        if not before and self.memory[stage] == 1.0:
            return May(limit_s, limit)
        spare = max([live, *(other.live for other in before)])
        held = (limit - spare) * float(self.memory[stage]) - sum(other.held for other in before)
        return May(limit_s * float(self.time[stage]) - sum(other.seconds for other in before), held + spare, spare)

    def mean_s(self, seconds: Sequence[float]) -> float:
        """The most that a stage and all before it on its place take, in the mean of these."""
        return max((own + sum(seconds[other] for other in self.before[stage])) / float(self.time[stage]) for stage, own in enumerate(seconds))
