"""Seconds of work with collectives in the background: the model of `simulate.engine` (streams, shared links and compute
units), with both spread evenly over time. Called by the prices of passes (autopar.pipeline).

    work          seconds of compute, and of collectives that compute waits for, alternating in small pieces
    background    other collectives; those of one mesh axis run one after the other, and all are ready from the
                  beginning

A background collective takes the share `contention` of the compute units from compute. Collectives that run at the same
time and together want more than a link has are all slowed by the same factor. What is left of the background when the
work is done is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LOCAL_AXIS = -1
"""The axis of what a rank does on its own, as copies around a collective."""


@dataclass(frozen=True, slots=True)
class Load:
    """Collectives on one mesh axis, or local copies (LOCAL_AXIS).

    seconds    of all of them, one after the other, if nothing slows them
    shares     by level of the cluster, the share of its link that they take while they run
    kind       of the collective; "" where there are several kinds
    nbytes     of all of them in a group, as `cost.comm.collective_s` takes it (0: not known)
    """

    axis: int
    seconds: float
    shares: Mapping[str, float]
    kind: str = ""
    nbytes: float = 0.0

    def times(self, factor: float) -> Load:
        """`factor` such loads, one after the other."""
        return Load(self.axis, self.seconds * factor, self.shares, self.kind, self.nbytes * factor)


def moves(load: Load) -> bool:
    """Whether a load is of collectives, not of local copies."""
    return load.axis != LOCAL_AXIS


def split(loads: Iterable[Load]) -> tuple[list[Load], list[Load]]:
    """The loads of a chain that runs in the background (`layout.legs`) as (local copies, which compute waits for;
    collectives)."""
    waited: list[Load] = []
    behind: list[Load] = []
    for load in loads:
        (waited if load.axis == LOCAL_AXIS else behind).append(load)
    return waited, behind


class Loads:
    """A sum of loads by axis; the shares of links are averaged over time."""

    def __init__(self, loads: Iterable[Load] = ()) -> None:
        self._seconds: dict[int, float] = {}
        self._taken: dict[int, dict[str, float]] = {}
        self.add(loads)

    def add(self, loads: Iterable[Load], factor: float = 1.0) -> None:
        """Add loads, each `factor` times."""
        for load in loads:
            seconds = load.seconds * factor
            self._seconds[load.axis] = self._seconds.get(load.axis, 0.0) + seconds
            taken = self._taken.setdefault(load.axis, {})
            for level, share in load.shares.items():
                taken[level] = taken.get(level, 0.0) + share * seconds

    def merge(self, other: Loads) -> None:
        """Add all of another sum."""
        for axis, seconds in other._seconds.items():
            self._seconds[axis] = self._seconds.get(axis, 0.0) + seconds
            taken = self._taken.setdefault(axis, {})
            for level, share_s in other._taken[axis].items():
                taken[level] = taken.get(level, 0.0) + share_s

    @property
    def local_s(self) -> float:
        """Seconds of local copies."""
        return self._seconds.get(LOCAL_AXIS, 0.0)

    @property
    def moving_s(self) -> float:
        """Seconds of collectives."""
        return sum(seconds for axis, seconds in self._seconds.items() if axis != LOCAL_AXIS)

    @property
    def all_s(self) -> float:
        """Seconds of copies and collectives, one after the other."""
        return sum(self._seconds.values())

    def moving(self) -> list[Load]:
        """The collectives, as one load for each axis."""
        return [
            Load(axis, seconds, {level: taken / seconds for level, taken in self._taken[axis].items()})
            for axis, seconds in self._seconds.items()
            if axis != LOCAL_AXIS and seconds > 0
        ]


def together_s(compute_s: float, waited: Sequence[Load], behind: Sequence[Load], contention: float) -> float:
    """Seconds from the begin of the work to the end of both the work and the background.

    `waited` (collectives that compute waits for) and `behind` (the background) have one load per axis. The background
    is followed from the end of one of its loads to the end of the next.
    """
    alone_s = compute_s + sum(load.seconds for load in waited)
    left, done, total_s = list(behind), 0.0, 0.0  # `done`: the share of the work that is done
    while left:
        compute_rate = 1.0 - min(0.99, contention * len(left))
        phases = [
            (compute_s / compute_rate, left),
            *((load.seconds * slower(load, [load, *left]), [load, *left]) for load in waited),
        ]
        pace_s = sum(seconds for seconds, _ in phases)  # of all of the work, if these stayed in the background
        moved = [sum(seconds / slower(load, running) for seconds, running in phases) for load in left]
        first = min(range(len(left)), key=lambda i: left[i].seconds / moved[i] if moved[i] > 0 else float("inf"))
        share = left[first].seconds / moved[first] if moved[first] > 0 else float("inf")
        if done + share >= 1.0:
            rest = 1.0 - done
            over = [load.times(1.0 - rest * by / load.seconds) for load, by in zip(left, moved, strict=True)]
            return total_s + rest * pace_s + _alone_s([load for load in over if load.seconds > 0])
        total_s, done = total_s + share * pace_s, done + share
        left = [
            load.times(1.0 - share * by / load.seconds)
            for i, (load, by) in enumerate(zip(left, moved, strict=True))
            if i != first
        ]
        left = [load for load in left if load.seconds > 0]  # two loads may end at once
    return total_s + (1.0 - done) * alone_s


def merged(loads: Iterable[Load]) -> list[Load]:
    """The collectives, as one load for each axis."""
    return Loads(loads).moving()


def slower(load: Load, running: Sequence[Load]) -> float:
    """The factor by which a load is slowed down by all that is `running`, itself included: the largest sum of their
    shares on any link of its own, at least 1."""
    return max((1.0, *(sum(other.shares.get(level, 0.0) for other in running) for level in load.shares)))


def _alone_s(behind: Sequence[Load]) -> float:
    """Seconds of the rest of the background when the work is done."""
    total_s, left = 0.0, list(behind)
    while left:
        took = [load.seconds * slower(load, left) for load in left]
        first_s = min(took)
        total_s += first_s
        left = [
            load.times(1.0 - first_s / seconds)
            for load, seconds in zip(left, took, strict=True)
            if seconds > first_s * (1 + 1e-12)
        ]
    return total_s
