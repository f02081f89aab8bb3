"""Claims that two processes look at side by side, in memory that both have: of each the parts that it was taken apart into, what is proven of these, and who looks at it now.

Which of them looks at what depends on how fast they are; what is proven in the end hardly does. A look is the same whoever takes it, but for how fast a plan is that is known by
then, and what comes of more looks than are needed is not counted.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

FORKS = "fork" in multiprocessing.get_all_start_methods()
"""Whether there are processes that share memory with this one."""

STEPS = 64
"""So many bounds of a claim are kept; beyond that only the last one."""

NOBODY = -1
"""Looks at a claim that anybody may take."""

GONE_S = 1.0
"""Who keeps the board to itself for so long is gone: it takes microseconds."""


class Part(NamedTuple):
    """Of a claim the shapes from `begin` to `end`: seconds that nothing on them beats, and how often they were looked at."""

    bound_s: float
    begin: int
    end: int
    looks: int


class Board:
    """Of claims by number, one at least, each with one part in the beginning; `most_looks`: nothing is looked at more often."""

    def __init__(self, claims: Sequence[Part], most_looks: int) -> None:
        count, most = len(claims), max(claim.end for claim in claims) + 1
        shared = np.frombuffer(mmap.mmap(-1, 8 * (count * (STEPS + 2 + 4 * most) + 1)))  # other processes that are forked from this one see what is written here
        self._known_s, shared = shared[:1], shared[1:].reshape(count, -1)
        self._parts, self._bounds = shared[:, :4 * most].reshape(count, most, 4), shared[:, 4 * most:-2]
        self._looks, self._owner = shared[:, -2:].T
        self._lock = multiprocessing.get_context("fork").Lock() if FORKS else threading.Lock()
        self.most_looks = most_looks
        self._parts[:, :, 0] = math.inf
        self._parts[:, 0] = np.array(claims).reshape(count, 4)
        self._bounds[:], self._owner[:] = self._parts[:, 0, :1], NOBODY  # [claims, looks]: behind the last look the same again
        self.know(math.inf)

    @property
    def known_s(self) -> float:
        """Seconds of the fastest plan that is known."""
        return float(self._known_s[0])

    def know(self, known_s: float) -> None:
        """There is a plan of so many seconds."""
        self._known_s[0] = known_s

    def proven_s(self, enough_s: float) -> float:
        """Seconds that nothing of all claims beats, each looked at until it has proven `enough_s`."""
        reached = self._bounds >= enough_s
        return float(np.where(reached.any(1), self._bounds[np.arange(len(reached)), reached.argmax(1)], self._bounds[:, -1]).min())

    @property
    def _done(self) -> np.ndarray:
        """[claims] whether the part of which least is proven can be looked at no closer."""
        least = self._parts[:, :, 0].argmin(1)
        return np.asarray(self._parts[np.arange(len(least)), least, 3] >= self.most_looks)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Nobody else reads or writes inside."""
        held = self._lock.acquire(timeout=GONE_S)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def open(self, enough_s: float) -> bool:
        """Whether looks may still prove more, up to `enough_s`: the claim of which least is proven can be looked at closer."""
        with self._held():
            return self._open(enough_s)

    def _open(self, enough_s: float) -> bool:
        least = self._bounds[:, -1].argmin()
        return bool(self._bounds[least, -1] < enough_s and not self._done[least])

    @property
    def looked(self) -> bool:
        """Whether the claim of which least is proven was looked at."""
        return bool(self._looks[self._bounds[:, -1].argmin()] > 0)

    @property
    def settled_s(self) -> float:
        """The least of the claims that can be looked at no closer: it is enough to prove as much of the others."""
        return float(self._bounds[self._done, -1].min(initial=math.inf))

    def take(self, who: int, enough_s: float) -> tuple[int, Part] | None:
        """Of the claims that nobody looks at the one of which least is proven, and of this the part; None where none of them may prove more. `who` looks at it until it is told."""
        with self._held():
            able = (self._owner == NOBODY) & ~self._done & (self._bounds[:, -1] < enough_s)
            if not able.any() or not self._open(enough_s):
                return None
            index = int(np.where(able, self._bounds[:, -1], math.inf).argmin())
            self._owner[index] = who
            bound_s, begin, end, looks = self._parts[index, self._parts[index, :, 0].argmin()]
            return index, Part(float(bound_s), int(begin), int(end), int(looks))

    def tell(self, index: int, parts: Sequence[Part]) -> None:
        """What a look has made of the part that was taken of a claim."""
        with self._held():
            own = self._parts[index]
            own[own[:, 0].argmin(), 0] = math.inf
            free = iter(np.flatnonzero(np.isinf(own[:, 0])))
            for part in parts:
                own[next(free)] = part
            at = min(int(self._looks[index]) + 1, STEPS - 1)
            self._bounds[index, at:] = max(own[:, 0].min(), self._bounds[index, -1])
            self._looks[index] += 1
            self._owner[index] = NOBODY

    def leave(self, who: int) -> None:
        """`who` is gone, and with it what it looked at."""
        self._owner[self._owner == who] = NOBODY
