"""Descent by what a step takes as it runs: a State that is near it and cheap to ask says which moves are worth pricing, the price decides.

    one    all choices of all nodes, the most promising first: the first that is faster by its price is made
    two    where there is none: two nodes of which neither sees the other, so that their changes just add up. One may make room in memory, or behind compute,
           for what the other gains

What is asked depends on nothing but the State and the prices, so the same comes of it every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.search.state import BYTES, Penalty, State

Choice = tuple[int, ...]

TRIED = 16
"""So many moves of each kind are priced before it is given up that one is faster."""

SHORT = 160
"""So many choices of each kind are tried in pairs."""

PROMISING = 1.01
"""A move is worth pricing that makes a step at most so many times as long by the State."""

GAIN = 1e-5
"""Relative: what gains less is rounding."""

LARGEST = 4096
"""Pairs that are asked for at once: more would not fit into a cache."""


def honed(state: State, start: Choice, price_s: Callable[[Choice], float], late: Callable[[], bool] = lambda: False, tried: int = TRIED) -> tuple[Choice, float]:
    """A solution that fits and no slower than `start`, which fits, and its seconds by `price_s`; it ends early where it is `late`. So many moves are `tried` before it is
    given up that one is faster."""
    state.reset(start)
    honing = _Honing(state, price_s, late, tried, start, price_s(start))
    while not late() and (honing.moved(honing.singles()) or honing.moved(honing.pairs())):
        pass
    return honing.best, honing.best_s


@dataclass(eq=False)
class _Honing:
    """The best solution so far, where `state` is."""

    state: State
    price_s: Callable[[Choice], float]
    late: Callable[[], bool]
    tried: int
    best: Choice
    best_s: float
    seen: set[Choice] = field(default_factory=set)

    def __post_init__(self) -> None:
        sizes = np.diff(self.state.starts)
        self.node = np.repeat(np.arange(len(sizes)), sizes)  # of each column: whose choice it is, and which
        self.choice = np.concatenate([np.arange(size) for size in sizes])
        self.sees = np.eye(len(sizes), dtype=bool)
        for v, near in enumerate(self.state.near):
            self.sees[v, near] = True
        scale_s, room = self.state.scale_s, self.state.limit_bytes
        self.fits = Penalty(0.0 if np.isinf(room) else 1e6 * scale_s / max(room, 1.0), 1e6 * scale_s)
        self.roomy = Penalty(0.0, 1e6 * scale_s)

    def moved(self, moves: Iterable[Choice]) -> bool:
        """Makes the first of `moves` that is faster by its price; False where none of them is."""
        priced = 0
        for made in moves:
            if made in self.seen:
                continue
            self.seen.add(made)
            if (seconds := self.price_s(made)) < self.best_s * (1 - GAIN):
                self.best, self.best_s = made, seconds
                self.state.reset(made)
                return True
            priced += 1
            if priced == self.tried or self.late():
                break
        return False

    def _with(self, *columns: int) -> Choice:
        """The best solution with the choices of some columns."""
        new = list(self.best)
        for column in columns:
            new[self.node[column]] = int(self.choice[column])
        return tuple(new)

    def singles(self) -> Iterator[Choice]:
        """Moves of one node, the most promising first."""
        for column in self._promising(self._seconds(self.fits)):
            yield self._with(column)

    def pairs(self) -> Iterator[Choice]:
        """Moves of two nodes, the most promising first."""
        short = self._short()
        one, other = (short[at] for at in np.triu_indices(len(short), 1))
        apart = ~self.sees[self.node[one], self.node[other]]
        one, other = one[apart], other[apart]
        totals, changes = self.state.totals, self.state.changes()
        seconds = np.concatenate([np.zeros(0), *(self.state.score(totals + changes[:, one[at:at + LARGEST]] + changes[:, other[at:at + LARGEST]], self.fits)
                                                 for at in range(0, len(one), LARGEST))])
        for at in self._promising(seconds):
            yield self._with(int(one[at]), int(other[at]))

    def _short(self) -> np.ndarray:
        """The choices that are tried in pairs: fastest that fit, fastest where there is room, and those that make most room for what they cost."""
        fits_s, roomy_s = self._seconds(self.fits), self._seconds(self.roomy)
        found = [np.argsort(fits_s, kind="stable")[:SHORT], np.argsort(roomy_s, kind="stable")[:SHORT]]
        if np.isfinite(self.state.limit_bytes):
            freed = -self.state.changes()[BYTES]
            frees = np.flatnonzero((freed > 0) & (roomy_s < self.fits.forbidden_s))
            rate = (roomy_s[frees] - self.best_s) / freed[frees]
            found.append(frees[np.argsort(rate, kind="stable")[:SHORT // 2]])
        return np.array(list(dict.fromkeys(np.concatenate(found).tolist())), int)

    def _seconds(self, penalty: Penalty) -> np.ndarray:
        """Of all choices of all nodes, with all others as they are; infinite where a node stays as it is."""
        seconds = self.state.score(self.state.totals + self.state.changes(), penalty)
        return np.where(self.choice == np.array(self.best)[self.node], np.inf, seconds)

    def _promising(self, seconds: np.ndarray) -> list[int]:
        """The moves that are worth pricing by their seconds by the State, the least first."""
        most_s = PROMISING * float(self.state.score(self.state.totals, self.fits)[0])
        order = np.argsort(seconds, kind="stable")
        found: list[int] = order[seconds[order] < most_s].tolist()
        return found
