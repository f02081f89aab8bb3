"""Where to cut: stages of contiguous pieces, the slowest stage and the fullest link as fast as can be, each stage within the memory of its
place and at its pace."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.pipeline.rooms import Budgets, May, Need, Spent

CLOSE = 1e-6  # relative: the slowest stage is as fast as can be but for so much


@dataclass(frozen=True, slots=True)
class Cost:
    """What one piece (see pipeline.units) costs on a place: seconds of a microbatch (of them `forward_s` in its forward), seconds once per
    step, bytes that a microbatch keeps, bytes that rest, and bytes that are there only while it runs. `inputs_s` and `weights_s` are the seconds
    of a backward that is taken apart, `both_s` of one that could be; `ends_s`, of a block, by the number of blocks of a stage (the last
    one: of so many and more), what the stage takes longer in its forward where it begins with it, in its backward where it ends with it, and there
    where it begins with it. `hidden_s`: of a piece that is no block, what of its forward and of its backward hides under the blocks of its stage."""

    micro_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    rest_bytes: float = 0.0
    live_bytes: float = 0.0
    forward_s: float = 0.0
    inputs_s: float = 0.0
    weights_s: float = 0.0
    both_s: float = 0.0
    ends_s: tuple[tuple[float, float, float], ...] = ()
    hidden_s: tuple[float, float] = (0.0, 0.0)


def memory_bytes(*stages: tuple[Sequence[Cost], int]) -> float:
    """Bytes of a place with these stages, of the pieces of each and of how many microbatches it keeps: what is there only while a piece runs is that of one at a time."""
    held = sum(c.rest_bytes + in_flight * c.kept_bytes for costs, in_flight in stages for c in costs)
    return held + max((c.live_bytes for costs, _ in stages for c in costs), default=0.0)


@dataclass(frozen=True, eq=False)
class Pieces:
    """All pieces of a model as they cost on one kind of place, and as they cost where they are run `again` in the backward."""

    costs: Sequence[Cost]
    again: Sequence[Cost]

    @cached_property
    def table(self) -> Table:
        """Time and memory of any stretch of them."""
        return Table(self.costs, self.again)


@dataclass(frozen=True, slots=True)
class Cuts:
    """`bounds` are the positions at which stages 1, 2, ... begin; `again` says for each stage how many of its first pieces are run
    again in the backward."""

    bounds: list[int]
    again: list[int]

    def parts(self, pieces: Sequence[Pieces]) -> list[list[Cost]]:
        """What each stage is made of; `pieces` are those of the place of each stage."""
        edges = [0, *self.bounds, len(pieces[0].costs)]
        return [[*here.again[a:a + n], *here.costs[a + n:b]]
                for here, (a, b), n in zip(pieces, itertools.pairwise(edges), self.again, strict=True)]


def balance(pieces: Sequence[Pieces], in_flight: Sequence[int], limits: Sequence[float], sends_s: Sequence[float] = (),
            barred: Sequence[int] = (), at: Sequence[int] = (), *, by_place: bool = False) -> Cuts:
    """The cut of the least time of the slowest stage, by bisection: for a given time, each stage takes as many pieces as it may. Of places with several stages
    the slowest is then as fast as can be; `by_place`: that first, and then the slowest stage. Where a microbatch is soon back the first is faster, where they are many the second.

    All have one entry per stage: the pieces as they cost where it runs (a faster device takes more of them), how many microbatches it
    keeps, the bytes that are there, and `at` which place (empty: each on its own). No more pieces are run again than memory wants. `sends_s` are the seconds of
    sending what a cut in front of each piece takes apart, one way (empty: nothing): no cut keeps a link busy for longer than the slowest stage takes, both ways,
    unless there is none that sends less; and none is in front of a piece of `barred`. Raises InfeasibleError with the bytes that are missing where memory
    allows no cut, without where too few are left.
    """
    tables, links = [here.table for here in pieces], _Links(len(pieces[0].costs), sends_s, barred)
    if links.count_of_cuts < len(tables) - 1:
        raise InfeasibleError(f"no cut into {len(tables)} stages: {links.count_of_cuts} of {links.count - 1} places to cut at are not between what reads a buffer and what changes it")
    at = at or range(len(tables))
    places, several = len(set(at)), len(at) > len(set(at))
    budgets = Budgets(at, limits, [table.need(flying) for table, flying in zip(tables, in_flight, strict=True)])
    slowest = max(links.fullest_s, *(float(table.seconds[-1] + table.more[-1]) for table in tables))
    fastest = _least_s(tables)

    def fill(stage_s: float, mean_s: float) -> Cuts | None:
        return _Filling(tables, links.ends(stage_s), in_flight, budgets, mean_s, stage_s).cuts()

    def by_stage(mean_s: float) -> tuple[Cuts | None, float]:
        return _least(lambda stage_s: fill(stage_s, mean_s), fastest, slowest)

    def by_mean(stage_s: float) -> tuple[Cuts | None, float]:
        return _least(lambda mean_s: fill(stage_s, mean_s), fastest * places / len(at), slowest)

    first, then = (by_mean, by_stage) if by_place and several else (by_stage, by_mean)
    best, least_s = first(slowest if several else math.inf)
    if best is None:
        raise _too_little(pieces, in_flight, limits, places)
    return then(least_s * (1 + CLOSE))[0] or best if several else best


def _least(fill: Callable[[float], Cuts | None], fastest: float, slowest: float) -> tuple[Cuts | None, float]:
    """The cuts of the least seconds, between two, for which `fill` finds any, and these seconds."""
    best = fill(slowest)
    while best is not None and slowest > fastest * (1 + CLOSE):
        middle = (slowest + fastest) / 2
        found = fill(middle)
        if found is None:
            fastest = middle
        else:
            best, slowest = found, middle
    return best, slowest


def _least_s(tables: Sequence[Table]) -> float:
    """Seconds that the slowest stage takes at least: each piece alone where it is fastest, the first and the last one where they must be."""
    each = np.min([np.diff(table.seconds) for table in dict.fromkeys(tables)], axis=0)
    return float(max(each.max(), tables[0].seconds[1], tables[-1].seconds[-1] - tables[-1].seconds[-2]))


def _too_little(pieces: Sequence[Pieces], in_flight: Sequence[int], limits: Sequence[float], places: int) -> InfeasibleError:
    """What is missing for any cut."""
    whole, there = memory_bytes((pieces[0].again, max(in_flight))) / places, sum(limits) / len(limits)
    return InfeasibleError(f"no cut into {len(in_flight)} stages fits: they need about {whole / 2**30:.2f} GiB each, "
                           f"{there / 2**30:.2f} GiB are there", missing_bytes=max(0.0, whole - there))


class _Links:
    """Seconds that a cut in front of each piece but the first keeps a link busy."""

    def __init__(self, count: int, sends_s: Sequence[float], barred: Sequence[int]) -> None:
        self.count = count
        self.seconds = 2 * np.array(sends_s[1:] or [0.0] * (count - 1))
        self.free = np.ones(count - 1, dtype=bool)
        self.free[[place - 1 for place in barred]] = False

    @property
    def count_of_cuts(self) -> int:
        """How many places there are to cut at."""
        return int(self.free.sum())

    @property
    def fullest_s(self) -> float:
        """Seconds of the link of the cut that sends most."""
        return float(self.seconds[self.free].max(initial=0.0))

    def ends(self, limit_s: float) -> list[int]:
        """Where a stage may end: cuts whose link is busy for no longer than `limit_s`, or than that of the cut that sends least."""
        allowed = max(limit_s, float(self.seconds[self.free].min(initial=np.inf)))
        return [*(int(i) + 1 for i in np.flatnonzero((self.seconds <= allowed) & self.free)), self.count]


class Table:
    """Running sums over the pieces: of any stretch of them, time and memory at once."""

    def __init__(self, costs: Sequence[Cost], again: Sequence[Cost]) -> None:
        self.count = len(costs)
        self.seconds = _sums([c.micro_s for c in costs])
        self.more = _sums([b.micro_s - a.micro_s for a, b in zip(costs, again, strict=True)])
        self.rest = _sums([c.rest_bytes for c in costs])
        self.kept = _sums([c.kept_bytes for c in costs])
        self.freed = _sums([max(0.0, a.kept_bytes - b.kept_bytes) for a, b in zip(costs, again, strict=True)])
        live = np.array([c.live_bytes for c in costs])
        self.live_again = np.array([c.live_bytes for c in again])
        self._most = [live.tolist()]  # of 2^n pieces from each on
        while 2 ** len(self._most) <= self.count:
            last, half = self._most[-1], 2 ** (len(self._most) - 1)
            self._most.append([max(pair) for pair in zip(last, last[half:], strict=False)])
        self._most_live = float(live.max())
        self._slower = bool((np.diff(self.more) >= 0).all())  # no piece takes less where it is run again
        self._seconds, self._more, self._rest, self._kept = (sums.tolist() for sums in (self.seconds, self.more, self.rest, self.kept))  # read one by one

    def again(self, first: int, stop: int, flying: int, limit_bytes: float, spare_bytes: float = 0.0) -> int | None:
        """How many of the first pieces of `[first, stop)` must be run again to fit; None where all are not enough. What they hold leaves `spare_bytes` at least for what is
        there only while one of them runs."""
        held = self.held(first, stop, flying)
        if held + max(self._most_live, spare_bytes) <= limit_bytes or held + (live := max(spare_bytes, self.live(first, stop))) <= limit_bytes:
            return 0
        most = np.maximum.accumulate(np.maximum(self.live_again[first:stop], live))
        left = held + most - flying * (self.freed[first + 1:stop + 1] - self.freed[first])
        fits = np.flatnonzero(left <= limit_bytes)
        return int(fits[0]) + 1 if len(fits) else None

    def held(self, first: int, stop: int, flying: int) -> float:
        """Bytes of what rests in `[first, stop)`, and of what `flying` microbatches keep of it."""
        return self._rest[stop] - self._rest[first] + flying * (self._kept[stop] - self._kept[first])

    def need(self, flying: int, first: int = 0, stop: int | None = None) -> Need:
        """What a stage of `[first, stop)`, or of all pieces, takes; of what is there only while one of them runs that of most of them."""
        stop = self.count if stop is None else stop
        live, live_again = (float(np.median(each[first:stop])) for each in (self._most[0], self.live_again))
        return Need(self.held(first, stop, flying), flying * float(self.freed[stop] - self.freed[first]), live, live_again)

    def live(self, first: int, stop: int) -> float:
        """The most bytes of `[first, stop)` that are there only while a piece runs: the most of two stretches that cover it."""
        power = (stop - first).bit_length() - 1
        return max(self._most[power][first], self._most[power][stop - 2**power])

    def slow(self, first: int, stop: int, limit_s: float) -> bool:
        """Whether a stage surely takes longer than `limit_s`, whatever memory wants."""
        return self._slower and self._seconds[stop] - self._seconds[first] > limit_s

    def time_s(self, first: int, stop: int, again: int) -> float:
        """Seconds of a stage."""
        return self._seconds[stop] - self._seconds[first] + self._more[first + again] - self._more[first]


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])


class _Filling:
    """Stages that take as many pieces as they may, one after the other: no longer than `most_s`, and `mean_s` in the mean of a place; `ends` are the positions where
    they may end."""

    def __init__(self, tables: Sequence[Table], ends: Sequence[int], in_flight: Sequence[int], budgets: Budgets, mean_s: float, most_s: float) -> None:
        self.tables, self.ends, self.in_flight, self.budgets, self.mean_s, self.most_s = tables, ends, in_flight, budgets, mean_s, most_s
        self.edges = [0]  # where each stage begins, and the last one ends
        self.may: list[May] = []
        self.spent: list[Spent] = []
        self.never: dict[tuple[int, int], None] = {}  # stages, and where they cannot end

    def cuts(self) -> Cuts | None:
        """The cuts; None where pieces are left."""
        for stage in range(len(self.tables)):
            self.may.append(self.budgets.of(stage, self.mean_s, self.spent))
            end = self._furthest(stage)
            if end is not None:
                self.edges.append(end)
            elif not any(self._ends_at(stage, stop) for stop in reversed(self.ends[:bisect_right(self.ends, self.edges[-1])])):
                return None
            else:
                self.spent = [self._spent(other) for other in range(stage)]
            self.spent.append(self._spent(stage))
        if self.edges[-1] != self.ends[-1]:
            return None
        again = [self._again(stage, *edges) or 0 for stage, edges in enumerate(itertools.pairwise(self.edges))]
        return Cuts(self.edges[1:-1], again)

    def _again(self, stage: int, first: int, stop: int) -> int | None:
        """How many of the first pieces of `[first, stop)` a stage runs again; None where it cannot have them."""
        table, (limit_s, *room) = self.tables[stage], self.may[stage]
        limit_s = min(limit_s, self.most_s) * (1 + 1e-12)
        if table.slow(first, stop, limit_s):
            return None
        again = table.again(first, stop, self.in_flight[stage], *room)
        slow = again is not None and table.time_s(first, stop, again) > limit_s
        return None if slow else again

    def _spent(self, stage: int) -> Spent:
        """What a stage takes as it is."""
        table, (first, stop), flying = self.tables[stage], self.edges[stage:stage + 2], self.in_flight[stage]
        again = self._again(stage, first, stop) or 0
        held = table.held(first, stop, flying) - flying * float(table.freed[first + again] - table.freed[first])
        live = max(table.live(first, stop), float(table.live_again[first:first + again].max(initial=0.0)))
        return Spent(table.time_s(first, stop, again), held, live)

    def _furthest(self, stage: int) -> int | None:
        """The last end that a stage may have, with one left for each stage behind; None where it cannot even have the next one."""
        first, ends = self.edges[-1], self.ends
        low, high = bisect_right(ends, first), len(ends) - len(self.tables) + stage
        if low > high or self._again(stage, first, ends[low]) is None:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._again(stage, first, ends[middle]) is not None else (low, middle - 1)
        return ends[low]

    def _ends_at(self, stage: int, stop: int) -> bool:
        """Make a stage end at `stop`, which is no further than where it ends now, or begins: those before it take fewer pieces if need be, as
        where it is on a slower or smaller place and cannot have the piece that they have left. False where that cannot be."""
        if self.edges[stage] < stop:
            self.edges[stage + 1:] = [stop]
            return True
        for first in reversed(self.ends[:bisect_left(self.ends, stop)] if stage and (stage, stop) not in self.never else ()):
            if self._again(stage, first, stop) is None:
                break
            if self._ends_at(stage - 1, first):
                self.edges[stage + 1:] = [stop]
                return True
        self.never[stage, stop] = None
        return False
