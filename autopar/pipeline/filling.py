"""Stages filled with pieces one after the other, each with as many as it may have."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.pipeline.memory_shares import Budgets, May, Spent
from autopar.pipeline.orders import Flying
from autopar.pipeline.stretches import Cost, Pieces, Table


@dataclass(frozen=True, slots=True)
class Cuts:
    """`bounds` are the positions at which stages 1, 2, ... begin; `again` says for each stage how many of its first
    pieces are run again in the backward."""

    bounds: list[int]
    again: list[int]

    def parts(self, pieces: Sequence[Pieces]) -> list[list[Cost]]:
        """What each stage is made of; `pieces` are those of the place of each stage."""
        return [
            [*here.again[first : first + n], *here.costs[first + n : stop]]
            for here, (first, stop), n in zip(
                pieces, piece_ranges(self.bounds, len(pieces[0].costs)), self.again, strict=True
            )
        ]


def piece_ranges(bounds: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Of each stage, the number of its first piece and of the piece after its last one: `count` pieces are cut at
    `bounds` (Cuts.bounds)."""
    return list(itertools.pairwise([0, *bounds, count]))


class Links:
    """The possible cuts, before each piece but the first, and the seconds that each keeps its link busy. Each of the
    stages `whose` must have one of the pieces `needed`; the others any piece."""

    def __init__(
        self,
        count: int,
        sends_s: Sequence[float],
        barred: Sequence[int],
        needed: Sequence[int] = (),
        whose: Collection[int] = (),
    ) -> None:
        self.count, self._needed, self._whose = count, needed, whose
        self.seconds = 2 * np.array(sends_s[1:] or [0.0] * (count - 1))
        self.free = np.ones(count - 1, dtype=bool)
        self.free[[place - 1 for place in barred]] = False

    @property
    def count_of_cuts(self) -> int:
        """How many places there are to cut at."""
        return int(self.free.sum())

    @property
    def fullest_s(self) -> float:
        """Seconds on the link of the cut that sends most."""
        return float(self.seconds[self.free].max(initial=0.0))

    @cached_property
    def _emptiest_s(self) -> float:
        """Seconds on the link of the cut that sends least."""
        return float(self.seconds[self.free].min(initial=np.inf))

    def fullest_of_s(self, bounds: Sequence[int]) -> float:
        """Seconds on the busiest link of some cuts; 0 where none of them sends more than the cut that sends least."""
        fullest = max((float(self.seconds[at - 1]) for at in bounds), default=0.0)
        return fullest if fullest > self._emptiest_s else 0.0

    def ends(self, limit_s: float) -> list[int]:
        """Where a stage may end: cuts whose link is busy for no longer than `limit_s`, or than that of the cut that
        sends least."""
        allowed = max(limit_s, self._emptiest_s)
        return [*(int(i) + 1 for i in np.flatnonzero((self.seconds <= allowed) & self.free)), self.count]

    def first_stop(self, stage: int, begin: int) -> int:
        """The first position at which `stage` may end if it begins at `begin`; behind all pieces where it cannot."""
        needed = self._needed_in(stage)
        found = bisect_left(needed, begin)
        return needed[found] + 1 if found < len(needed) else self.count + 1

    def last_begin(self, stage: int, stop: int) -> int:
        """The last position at which `stage` may begin if it ends at `stop`; -1 where it cannot."""
        needed = self._needed_in(stage)
        found = bisect_left(needed, stop)
        return needed[found - 1] if found else -1

    def _needed_in(self, stage: int) -> Sequence[int]:
        """The pieces of which `stage` is to have one."""
        return self._needed if stage in self._whose else range(self.count)

    def last_ends(self, ends: Sequence[int], stages: int) -> list[int]:
        """The last of `ends` of each stage that leaves enough for those behind it; none where there is no such cut."""
        found = [self.count]
        while len(found) < stages:
            before = bisect_right(ends, self.last_begin(stages - len(found), found[-1]))
            if not before:
                return []
            found.append(ends[before - 1])
        return found[::-1] if self.last_begin(0, found[-1]) >= 0 else []


class Filling:
    """Stages that take as many pieces as they may, one after the other: each `stage_s` at most, as what its links send,
    and with those before it on its place `mean_s` each in the mean."""

    def __init__(
        self,
        tables: Sequence[Table],
        links: Links,
        in_flight: Sequence[Flying],
        budgets: Budgets,
        stage_s: float,
        mean_s: float,
    ) -> None:
        self.tables, self.links, self.in_flight, self.budgets, self._stage_s, self._mean_s = (
            tables,
            links,
            in_flight,
            budgets,
            stage_s,
            mean_s,
        )
        self.ends = links.ends(stage_s)  # where a stage may end
        self.last_ends = links.last_ends(self.ends, len(tables))
        self.edges = [0]  # where each stage begins, and the last one ends
        self.may: list[May] = []
        self.spent: list[Spent] = []
        self.never: dict[tuple[int, int], None] = {}  # stages, and where they cannot end

    def fill(self) -> bool:
        """Whether no piece is left."""
        if not self.last_ends:
            return False
        for stage in range(len(self.tables)):
            self.may.append(self.budgets.of(stage, self._mean_s, self.spent))
            end = self._furthest(stage)
            if end is not None:
                self.edges.append(end)
            elif not any(
                self._ends_at(stage, stop) and self._moved(stage)
                for stop in reversed(self.ends[: bisect_left(self.ends, self.links.first_stop(stage, self.edges[-1]))])
            ):
                return False
            self.spent.append(self._spent(stage))
        return self.edges[-1] == self.ends[-1]

    @property
    def cuts(self) -> Cuts:
        """Where the stages begin, and what they run again."""
        return Cuts(
            self.edges[1:-1],
            [self._again(stage, *edges) or 0 for stage, edges in enumerate(itertools.pairwise(self.edges))],
        )

    def longest_s(self) -> float:
        """Seconds of the slowest stage or of the fullest link."""
        return max(self.links.fullest_of_s(self.edges[1:-1]), *(spent.seconds for spent in self.spent))

    def mean_s(self) -> float:
        """Seconds of a stage and all before it on its place, in the mean of these, of those that take longest."""
        return self.budgets.mean_s([spent.seconds for spent in self.spent])

    def _again(self, stage: int, first: int, stop: int) -> int | None:
        """How many of the first pieces of `[first, stop)` a stage runs again; None where it cannot have them."""
        table, (limit_s, *room) = self.tables[stage], self.may[stage]
        limit_s = min(limit_s, self._stage_s) * (1 + 1e-12)
        if table.slow(first, stop, limit_s):
            return None
        again = table.again(first, stop, self.in_flight[stage], *room)
        slow = again is not None and table.time_s(first, stop, again) > limit_s
        return None if slow else again

    def _spent(self, stage: int) -> Spent:
        """What a stage takes as it is."""
        table, (first, stop), flying = self.tables[stage], self.edges[stage : stage + 2], self.in_flight[stage]
        again = self._again(stage, first, stop) or 0
        held = table.held(first, stop, flying) - table.saved(first, first + again, flying)
        live = max(table.live(first, stop), float(table.live_again[first : first + again].max(initial=0.0)))
        return Spent(table.time_s(first, stop, again), held, live)

    def _furthest(self, stage: int) -> int | None:
        """The last end that a stage may have, with one left for each stage behind; None where it cannot even have the
        next one."""
        first, ends = self.edges[-1], self.ends
        low, high = bisect_left(ends, self.links.first_stop(stage, first)), bisect_left(ends, self.last_ends[stage])
        if low > high or self._again(stage, first, ends[low]) is None:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._again(stage, first, ends[middle]) is not None else (low, middle - 1)
        return ends[low]

    def _ends_at(self, stage: int, stop: int) -> bool:
        """Make a stage end at `stop`, which is no further than where it ends now, or begins: those before it take fewer
        pieces if need be, as where it is on a slower or smaller place and cannot have the piece that they have left.
        False where that cannot be."""
        if self.links.first_stop(stage, self.edges[stage]) <= stop:
            self.edges[stage + 1 :] = [stop]
            return True
        for first in reversed(
            self.ends[: bisect_right(self.ends, self.links.last_begin(stage, stop))]
            if stage and (stage, stop) not in self.never
            else ()
        ):
            if self._again(stage, first, stop) is None:
                break
            if self._ends_at(stage - 1, first):
                self.edges[stage + 1 :] = [stop]
                return True
        self.never[stage, stop] = None
        return False

    def _moved(self, stage: int) -> bool:
        """Take for `stage` and those before it what they may have as these end now. False, and nothing is taken, where
        one may not have what it was moved to: of two stages of a place the first can have more there than what the
        second was told that it leaves."""
        moved = Filling(self.tables, self.links, self.in_flight, self.budgets, self._stage_s, self._mean_s)
        moved.edges = self.edges
        for other, (first, stop) in enumerate(itertools.pairwise(self.edges)):
            moved.may.append(self.budgets.of(other, self._mean_s, moved.spent))
            if moved._again(other, first, stop) is None:
                return False
            moved.spent.append(moved._spent(other))
        self.may, self.spent, self.never = moved.may, moved.spent[:stage], {}
        return True
