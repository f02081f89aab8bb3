"""The state of the claims of a proof (joint.prove), in memory that two processes share: the parts that each claim was
divided into, the bound of each part, and which process is looking at it. Used by prove and background_proof.

Which process takes which look depends on timing, but the bound that is proven hardly does: a look has the same result
in both, up to the cutoff from the fastest plan known by then, and looks beyond those that were needed are not counted
(`Board.proven_s`).
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
"""Whether this system has processes that share memory with their parent."""

STEPS = 64
"""How many bounds of a claim are kept, one per look; after that the last is overwritten."""

LONG = 3
"""Looks at a part after which the next one takes long (prove.LOOKS, which has cases from there on)."""

NOBODY = -1
"""The owner of a claim that no process is looking at."""

GONE_S = 1.0
"""Seconds to wait for the lock, which is held for microseconds: a process that keeps it for longer has died."""


class Part(NamedTuple):
    """The shapes `[begin, end)` of a claim: a lower bound in seconds on all plans on them, and the number of looks
    taken at them."""

    bound_s: float
    begin: int
    end: int
    looks: int


class Board:
    """The claims by number, at least one, each with one part at first. `most_looks`: looks at one part at most, of all
    claims or of each."""

    def __init__(self, claims: Sequence[Part], most_looks: int | Sequence[int]) -> None:
        count, most = len(claims), max(claim.end for claim in claims) + 1
        # other processes that are forked from this one see what is written here
        shared = np.frombuffer(mmap.mmap(-1, 8 * (count * (STEPS + 2 + 4 * most) + 1)))
        self._known_s, shared = shared[:1], shared[1:].reshape(count, -1)
        self._parts, self._bounds = shared[:, : 4 * most].reshape(count, most, 4), shared[:, 4 * most : -2]
        self._looks, self._owner = shared[:, -2:].T
        self._lock = multiprocessing.get_context("fork").Lock() if FORKS else threading.Lock()
        self.most_looks = np.broadcast_to(most_looks, count)
        self._parts[:, :, 0] = math.inf
        self._parts[:, 0] = np.array(claims).reshape(count, 4)
        # [claims, looks]: behind the last look the same again
        self._bounds[:], self._owner[:] = self._parts[:, 0, :1], NOBODY
        self.know(math.inf)

    @property
    def known_s(self) -> float:
        """Seconds of the fastest known plan."""
        return float(self._known_s[0])

    def know(self, known_s: float) -> None:
        """Set the seconds of the fastest known plan."""
        self._known_s[0] = known_s

    def proven_s(self, enough_s: float) -> float:
        """The lower bound on all claims, each as of the first look after which it was at least `enough_s`."""
        reached = self._bounds >= enough_s
        return float(
            np.where(
                reached.any(1), self._bounds[np.arange(len(reached)), reached.argmax(1)], self._bounds[:, -1]
            ).min()
        )

    @property
    def _done(self) -> np.ndarray:
        """[claims] whether the part with the lowest bound has had all its looks."""
        return np.asarray(self._taken >= self.most_looks)

    @property
    def _taken(self) -> np.ndarray:
        """[claims] how many looks the part with the lowest bound has had."""
        least = self._parts[:, :, 0].argmin(1)
        return np.asarray(self._parts[np.arange(len(least)), least, 3])

    @contextmanager
    def _held(self) -> Iterator[None]:
        """A context in which the lock is held. A lock whose holder has died is ignored (GONE_S)."""
        held = self._lock.acquire(timeout=GONE_S)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def open(self, enough_s: float) -> bool:
        """Whether a look may still raise the bound of all claims, where that is below `enough_s`."""
        with self._held():
            return self._open(enough_s)

    def _open(self, enough_s: float) -> bool:
        """As `open`, while the lock is held."""
        least = self._bounds[:, -1].argmin()
        return bool(self._bounds[least, -1] < enough_s and not self._done[least])

    @property
    def looked(self) -> bool:
        """Whether the claim with the lowest bound has had a look."""
        return bool(self._looks[self._bounds[:, -1].argmin()] > 0)

    @property
    def settled_s(self) -> float:
        """The lowest bound of claims that have had all their looks. Nothing is gained by raising other claims above
        it."""
        return float(self._bounds[self._done, -1].min(initial=math.inf))

    def take(self, who: int, enough_s: float) -> tuple[int, Part] | None:
        """The free claim with the lowest bound, and its part with the lowest bound; `who` owns it until `tell`. Long
        looks come last: a faster plan may be known by then, above which bounds need not be exact. None where no look
        can help."""
        with self._held():
            able = (self._owner == NOBODY) & ~self._done & (self._bounds[:, -1] < enough_s)
            if not able.any() or not self._open(enough_s):
                return None
            quick = able & (self._taken < LONG)
            able = quick if quick.any() else able
            index = int(np.where(able, self._bounds[:, -1], math.inf).argmin())
            return index, self._own(who, index)

    def take_first(self, who: int, index: int) -> Part | None:
        """Claim number `index`, as `take`, if nobody has looked at it or is looking."""
        with self._held():
            if self._looks[index] or self._owner[index] != NOBODY:
                return None
            return self._own(who, index)

    def _own(self, who: int, index: int) -> Part:
        """Make `who` the owner of claim number `index`, while the lock is held. Its part with the lowest bound."""
        self._owner[index] = who
        bound_s, begin, end, looks = self._parts[index, self._parts[index, :, 0].argmin()]
        return Part(float(bound_s), int(begin), int(end), int(looks))

    def first_s(self, index: int) -> float | None:
        """The bound of claim number `index` after the first look at it; None before that."""
        with self._held():
            return float(self._bounds[index, 1]) if self._looks[index] else None

    def tell(self, index: int, parts: Sequence[Part]) -> None:
        """Replace the part that was taken of claim `index` by what the look has made of it, and free the claim."""
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
        """Free the claims of `who`, which has ended."""
        self._owner[self._owner == who] = NOBODY
