"""Cuts of a model into stages that are filled greedily: each stage takes as many consecutive pieces as its limits of
time and memory allow, first stage to last. Called by pipeline.balance, which bisects over the limit of time."""

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
    """A cut of the pieces into stages: stages 1, 2, ... begin at the positions `bounds`; the first `again[i]` pieces of
    stage i run again in the backward."""

    bounds: list[int]
    again: list[int]

    def parts(self, pieces: Sequence[Pieces]) -> list[list[Cost]]:
        """The costs of the pieces of each stage; `pieces` are those of the place of each stage."""
        return [
            [*here.again[first : first + n], *here.costs[first + n : stop]]
            for here, (first, stop), n in zip(
                pieces, piece_ranges(self.bounds, len(pieces[0].costs)), self.again, strict=True
            )
        ]


def piece_ranges(bounds: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(first, stop) of each stage: the positions of its first piece and behind its last one, where `count` pieces are
    cut at `bounds` (Cuts.bounds)."""
    return list(itertools.pairwise([0, *bounds, count]))


class Links:
    """The positions at which `count` pieces may be cut, and how long the tensors that cross each cut keep a link busy.

    sends_s    by piece, seconds of sending in one direction what crosses a cut in front of it; empty: nothing
    barred     the pieces in front of which no cut is allowed
    needed     pieces of which each of the stages `whose` must have one; other stages may have any
    """

    def __init__(
        self,
        count: int,
        sends_s: Sequence[float],
        barred: Sequence[int],
        needed: Sequence[int] = (),
        whose: Collection[int] = (),
    ) -> None:
        self.count, self._needed, self._whose = count, needed, whose
        self.seconds = 2 * np.array(sends_s[1:] or [0.0] * (count - 1))  # by cut, in both directions
        self.free = np.ones(count - 1, dtype=bool)
        self.free[[place - 1 for place in barred]] = False

    @property
    def count_of_cuts(self) -> int:
        """The number of positions at which a cut is allowed."""
        return int(self.free.sum())

    @property
    def fullest_s(self) -> float:
        """Seconds on the link of the allowed cut that sends most."""
        return float(self.seconds[self.free].max(initial=0.0))

    @cached_property
    def _emptiest_s(self) -> float:
        """Seconds on the link of the allowed cut that sends least."""
        return float(self.seconds[self.free].min(initial=np.inf))

    def fullest_of_s(self, bounds: Sequence[int]) -> float:
        """Seconds on the busiest link of the cuts `bounds`; 0 where none of them sends more than the allowed cut that
        sends least."""
        fullest = max((float(self.seconds[at - 1]) for at in bounds), default=0.0)
        return fullest if fullest > self._emptiest_s else 0.0

    def ends(self, limit_s: float) -> list[int]:
        """The positions at which a stage may end: cuts that keep their link busy for at most `limit_s`, or for no
        longer than the cut that sends least; and the end of all pieces."""
        allowed = max(limit_s, self._emptiest_s)
        return [*(int(i) + 1 for i in np.flatnonzero((self.seconds <= allowed) & self.free)), self.count]

    def first_stop(self, stage: int, begin: int) -> int:
        """The first position at which `stage` may end if it begins at `begin`: behind its first needed piece. Greater
        than `count` where there is none left."""
        needed = self._needed_in(stage)
        found = bisect_left(needed, begin)
        return needed[found] + 1 if found < len(needed) else self.count + 1

    def last_begin(self, stage: int, stop: int) -> int:
        """The last position at which `stage` may begin if it ends at `stop`; -1 where there is none."""
        needed = self._needed_in(stage)
        found = bisect_left(needed, stop)
        return needed[found - 1] if found else -1

    def _needed_in(self, stage: int) -> Sequence[int]:
        """The pieces of which `stage` must have one."""
        return self._needed if stage in self._whose else range(self.count)

    def last_ends(self, ends: Sequence[int], stages: int) -> list[int]:
        """For each of `stages` stages the last one of `ends` at which it can end such that all later stages can have
        the pieces that they need; empty where there is no such cut."""
        found = [self.count]
        while len(found) < stages:
            before = bisect_right(ends, self.last_begin(stages - len(found), found[-1]))
            if not before:
                return []
            found.append(ends[before - 1])
        return found[::-1] if self.last_begin(0, found[-1]) >= 0 else []


class Filling:
    """One greedy cut. Limits: each stage, and its link, takes at most `stage_s` seconds; the stages of a place up to
    any of them take at most `mean_s` each on average; each stage stays within its share of the memory of its place
    (`budgets`).

        ends         positions at which a stage may end
        last_ends    the last one for each stage (Links.last_ends)
        edges        where each stage begins, and the last one ends, so far
        may          what each stage may take, so far
        spent        what each stage takes, so far
        never        (stage, end) pairs that are known to be impossible at the present limits
    """

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
        self.ends = links.ends(stage_s)
        self.last_ends = links.last_ends(self.ends, len(tables))
        self.edges = [0]
        self.may: list[May] = []
        self.spent: list[Spent] = []
        self.never: dict[tuple[int, int], None] = {}

    def fill(self) -> bool:
        """Fill all stages. Returns whether they take all pieces."""
        if not self.last_ends:
            return False
        for stage in range(len(self.tables)):
            self.may.append(self.budgets.of(stage, self._mean_s, self.spent))
            end = self._furthest(stage)
            if end is not None:
                self.edges.append(end)
            elif not any(
                self._ends_at(stage, stop) and self._taken_as_cut(stage)
                for stop in reversed(self.ends[: bisect_left(self.ends, self.links.first_stop(stage, self.edges[-1]))])
            ):
                return False
            self.spent.append(self._spent(stage))
        return self.edges[-1] == self.ends[-1]

    @property
    def cuts(self) -> Cuts:
        """The cut, with as few pieces run again as memory requires."""
        return Cuts(
            self.edges[1:-1],
            [self._again(stage, *edges) or 0 for stage, edges in enumerate(itertools.pairwise(self.edges))],
        )

    def longest_s(self) -> float:
        """Seconds of the slowest stage or of the busiest link."""
        return max(self.links.fullest_of_s(self.edges[1:-1]), *(spent.seconds for spent in self.spent))

    def mean_s(self) -> float:
        """The largest average, over a stage and all stages before it on its place, of the seconds of a stage."""
        return self.budgets.mean_s([spent.seconds for spent in self.spent])

    def _again(self, stage: int, first: int, stop: int) -> int | None:
        """How many of the pieces `[first, stop)`, counted from the first, `stage` must run again to fit; None where it
        exceeds its limits with any number."""
        table, may = self.tables[stage], self.may[stage]
        limit_s = min(may.seconds, self._stage_s) * (1 + 1e-12)
        if table.slow(first, stop, limit_s):
            return None
        again = table.again(first, stop, self.in_flight[stage], may.nbytes, may.spare)
        slow = again is not None and table.time_s(first, stop, again) > limit_s
        return None if slow else again

    def _spent(self, stage: int) -> Spent:
        """What a stage takes as it is now."""
        table, (first, stop), flying = self.tables[stage], self.edges[stage : stage + 2], self.in_flight[stage]
        again = self._again(stage, first, stop) or 0
        held = table.held(first, stop, flying) - table.saved(first, first + again, flying)
        return Spent(table.time_s(first, stop, again), held, table.live(first, stop, again))

    def _furthest(self, stage: int) -> int | None:
        """The last position at which a stage may end and every later stage can still have a piece; None where it cannot
        even take its first piece. By bisection: more pieces take more time and memory."""
        first, ends = self.edges[-1], self.ends
        low, high = bisect_left(ends, self.links.first_stop(stage, first)), bisect_left(ends, self.last_ends[stage])
        if low > high or self._again(stage, first, ends[low]) is None:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._again(stage, first, ends[middle]) is not None else (low, middle - 1)
        return ends[low]

    def _ends_at(self, stage: int, stop: int) -> bool:
        """Make a stage end at `stop`, which is at most its present end, or its begin. Stages before it take fewer
        pieces if need be, as where this stage is on a slower or smaller place and cannot take the next piece. Returns
        whether that is possible."""
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

    def _taken_as_cut(self, stage: int) -> bool:
        """Recompute what `stage` and those before it may take and take, after their ends were moved. Returns False, and
        changes nothing, where one of them now exceeds its limits: of two stages of a place the first may take more
        after the move than the second one was told."""
        moved = Filling(self.tables, self.links, self.in_flight, self.budgets, self._stage_s, self._mean_s)
        moved.edges = self.edges
        for other, (first, stop) in enumerate(itertools.pairwise(self.edges)):
            moved.may.append(self.budgets.of(other, self._mean_s, moved.spent))
            if moved._again(other, first, stop) is None:
                return False
            moved.spent.append(moved._spent(other))
        self.may, self.spent, self.never = moved.may, moved.spent[:stage], {}
        return True
