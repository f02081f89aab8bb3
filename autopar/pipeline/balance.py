"""Where to cut: stages of contiguous pieces, the slowest stage and the fullest link as fast as can be, each stage within its memory."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError

STEPS = 40  # of the bisection: the slowest stage is known to a part in 10^12


@dataclass(frozen=True, slots=True)
class Cost:
    """What one piece (see pipeline.units) costs on a place: seconds of a microbatch (of them `forward_s` in its forward), seconds once per
    step, bytes that a microbatch keeps, bytes that rest, and bytes that are there only while it runs."""

    micro_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    rest_bytes: float = 0.0
    live_bytes: float = 0.0
    forward_s: float = 0.0


def memory_bytes(costs: Sequence[Cost], in_flight: int) -> float:
    """Bytes of a stage of these pieces that keeps `in_flight` microbatches."""
    return sum(c.rest_bytes + in_flight * c.kept_bytes for c in costs) + max((c.live_bytes for c in costs), default=0.0)


@dataclass(frozen=True, slots=True)
class Cuts:
    """`bounds` are the positions at which stages 1, 2, ... begin; `again` says for each stage how many of its first pieces are run
    again in the backward."""

    bounds: list[int]
    again: list[int]

    def parts(self, costs: Sequence[Cost], again: Sequence[Cost]) -> list[list[Cost]]:
        """What each stage is made of: `again` are the pieces as they cost where they are run again."""
        edges = [0, *self.bounds, len(costs)]
        return [[*again[a:a + n], *costs[a + n:b]] for (a, b), n in zip(itertools.pairwise(edges), self.again, strict=True)]


def balance(costs: Sequence[Cost], in_flight: Sequence[int], limit_bytes: float, again: Sequence[Cost] | None = None,
            sends_s: Sequence[float] = ()) -> Cuts:
    """The cut of the least time of the slowest stage, by bisection: for a given time, each stage takes as many pieces as it may.

    `in_flight` has one entry per stage. `again` are the pieces as they cost where they are run again in the backward: no more of
    them than memory wants. `sends_s` are the seconds of sending what a cut in front of each piece takes apart, one way (empty: nothing): no
    cut keeps a link busy for longer than the slowest stage takes, both ways, unless there is none that sends less. Raises InfeasibleError with
    the bytes that are missing where memory allows no cut.
    """
    table = _Table(costs, again or costs, sends_s)
    slowest, fastest = max(float(table.seconds[-1] + table.more[-1]), table.fullest_s), max(c.micro_s for c in costs)
    best = _fill(table, in_flight, limit_bytes, slowest)
    if best is None:
        whole = memory_bytes(again or costs, max(in_flight)) / len(in_flight)
        raise InfeasibleError(f"no cut into {len(in_flight)} stages fits: they need about {whole / 2**30:.2f} GiB each, "
                              f"{limit_bytes / 2**30:.2f} GiB are there", missing_bytes=max(0.0, whole - limit_bytes))
    for _ in range(STEPS):
        middle = (slowest + fastest) / 2
        found = _fill(table, in_flight, limit_bytes, middle)
        if found is None:
            fastest = middle
        else:
            best, slowest = found, middle
    return best


class _Table:
    """Running sums over the pieces: of any stretch of them, time and memory at once; and seconds that a cut in front of each keeps a link busy."""

    def __init__(self, costs: Sequence[Cost], again: Sequence[Cost], sends_s: Sequence[float]) -> None:
        self.count = len(costs)
        self.links_s = 2 * np.array(sends_s[1:] or [0.0] * (len(costs) - 1))
        self.seconds = _sums([c.micro_s for c in costs])
        self.more = _sums([b.micro_s - a.micro_s for a, b in zip(costs, again, strict=True)])
        self.rest = _sums([c.rest_bytes for c in costs])
        self.kept = _sums([c.kept_bytes for c in costs])
        self.freed = _sums([max(0.0, a.kept_bytes - b.kept_bytes) for a, b in zip(costs, again, strict=True)])
        self.live = np.array([c.live_bytes for c in costs])
        self.live_again = np.array([c.live_bytes for c in again])

    @property
    def fullest_s(self) -> float:
        """Seconds of the link of the cut that sends most."""
        return float(self.links_s.max(initial=0.0))

    def ends(self, limit_s: float) -> list[int]:
        """Where a stage may end: cuts whose link is busy for no longer than `limit_s`, or than that of the cut that sends least."""
        allowed = max(limit_s, float(self.links_s.min(initial=np.inf)))
        return [*(int(i) + 1 for i in np.flatnonzero(self.links_s <= allowed)), self.count]

    def again(self, first: int, stop: int, flying: int, limit_bytes: float) -> int | None:
        """How many of the first pieces of `[first, stop)` must be run again to fit; None where all are not enough."""
        held = self.rest[stop] - self.rest[first] + flying * (self.kept[stop] - self.kept[first])
        live = self.live[first:stop].max()
        if held + live <= limit_bytes:
            return 0
        most = np.maximum.accumulate(np.maximum(self.live_again[first:stop], live))
        left = held + most - flying * (self.freed[first + 1:stop + 1] - self.freed[first])
        fits = np.flatnonzero(left <= limit_bytes)
        return int(fits[0]) + 1 if len(fits) else None

    def time_s(self, first: int, stop: int, again: int) -> float:
        """Seconds of a stage."""
        return float(self.seconds[stop] - self.seconds[first] + self.more[first + again] - self.more[first])


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])


def _fill(table: _Table, in_flight: Sequence[int], limit_bytes: float, limit_s: float) -> Cuts | None:
    """The cuts when each stage takes as many pieces as time and memory allow; None where pieces are left."""
    bounds, counts, at = [], [], 0
    ends = table.ends(limit_s)
    for stage, flying in enumerate(in_flight):
        stop = len(ends) - (len(in_flight) - 1 - stage)  # each stage behind needs an end
        taken = _most(table, at, ends[bisect_right(ends, at):max(stop, 0)], flying, limit_bytes, limit_s)
        if taken is None:
            return None
        at, again = taken
        bounds.append(at)
        counts.append(again)
    return Cuts(bounds[:-1], counts) if at == table.count else None


def _most(table: _Table, first: int, ends: Sequence[int], flying: int, limit_bytes: float, limit_s: float) -> tuple[int, int] | None:
    """The last of `ends` to which a stage from `first` may go, and how many of its pieces are run again; None where not even the first
    fits. One piece may take longer than `limit_s`: then the time is not to be had, and pieces are left."""
    def at(stop: int) -> int | None:
        again = table.again(first, stop, flying, limit_bytes)
        slow = again is not None and stop > first + 1 and table.time_s(first, stop, again) > limit_s * (1 + 1e-12)
        return None if slow else again

    if not ends or at(ends[0]) is None:
        return None
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if at(ends[middle]) is not None else (low, middle - 1)
    found = at(ends[low])
    assert found is not None, "the longest stage that fits was looked for among those that do"
    return ends[low], found
