"""Honing: local search by the price of a step as it runs. That price is slow to compute, so a State, which approximates
it, selects the moves that are worth pricing. Called by search.tangents.

    one    moves of one node, the most promising first; the first one that is faster by its price is made
    two    if no such move is: moves of two nodes that share no net, so that their changes add up. One of them may free
           memory that the other needs, or add compute that hides the other's collectives

Deterministic: the order of moves follows from the State and the prices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.problem.types import Picks
from autopar.search.state import BYTES, Penalty, State

PRICED_MOVES = 16
"""Moves of each kind (one node, two nodes) that are priced at most before the descent ends."""

SHORTLIST = 160
"""Choices of each kind at most (`_Honing._short`) that are combined into pairs."""

PROMISING = 1.01
"""A move is worth pricing if by the State the step is then at most this many times as long."""

LEAST_GAIN = 1e-5
"""Relative to the step: a smaller gain may be rounding."""

PAIRS_AT_ONCE = 4096
"""Pairs that are scored at once, so that the arrays fit into a cache."""


def honed(
    state: State,
    start: Picks,
    price_s: Callable[[Picks], float],
    late: Callable[[], bool] = lambda: False,
    tried: int = PRICED_MOVES,
) -> tuple[Picks, float]:
    """Descend from `start`, which fits: a solution that fits and is no slower, and its seconds by `price_s`.

    `late` ends it early; `tried` is the number of moves of each kind that are priced before it gives up.
    """
    state.reset(start)
    honing = _Honing(state, price_s, late, tried, start, price_s(start))
    while not late() and (honing.moved(honing.singles()) or honing.moved(honing.pairs())):
        pass
    return honing.best, honing.best_s


@dataclass(eq=False)
class _Honing:
    """The descent so far: the best solution, at which `state` is, and those that were `seen` (priced)."""

    state: State
    price_s: Callable[[Picks], float]
    late: Callable[[], bool]
    tried: int
    best: Picks
    best_s: float
    seen: set[Picks] = field(default_factory=set)

    def __post_init__(self) -> None:
        sizes = np.diff(self.state.starts)
        # of each column of the State's changes: the node and its choice
        self.node = np.repeat(np.arange(len(sizes)), sizes)
        self.choice = np.concatenate([np.arange(size) for size in sizes])
        self.sees = np.eye(len(sizes), dtype=bool)
        for v, near in enumerate(self.state.near):
            self.sees[v, near] = True
        scale_s, room = self.state.scale_s, self.state.limit_bytes
        self.fits = Penalty(0.0 if np.isinf(room) else 1e6 * scale_s / max(room, 1.0), 1e6 * scale_s)
        self.roomy = Penalty(0.0, 1e6 * scale_s)

    def moved(self, moves: Iterable[Picks]) -> bool:
        """Make the first of `moves` that is faster by its price; whether there was one."""
        priced = 0
        for made in moves:
            if made in self.seen:
                continue
            self.seen.add(made)
            if (seconds := self.price_s(made)) < self.best_s * (1 - LEAST_GAIN):
                self.best, self.best_s = made, seconds
                self.state.reset(made)
                return True
            priced += 1
            if priced == self.tried or self.late():
                break
        return False

    def _with(self, *columns: int) -> Picks:
        """The best solution with the choices of some columns."""
        new = list(self.best)
        for column in columns:
            new[self.node[column]] = int(self.choice[column])
        return tuple(new)

    def singles(self) -> Iterator[Picks]:
        """Moves of one node, the most promising first."""
        for column in self._promising(self._seconds(self.fits)):
            yield self._with(column)

    def pairs(self) -> Iterator[Picks]:
        """Moves of two nodes, the most promising first."""
        short = self._short()
        one, other = (short[at] for at in np.triu_indices(len(short), 1))
        apart = ~self.sees[self.node[one], self.node[other]]
        one, other = one[apart], other[apart]
        totals, changes = self.state.totals, self.state.changes()
        seconds = np.concatenate(
            [
                np.zeros(0),
                *(
                    self.state.score(
                        totals + changes[:, one[at : at + PAIRS_AT_ONCE]] + changes[:, other[at : at + PAIRS_AT_ONCE]],
                        self.fits,
                    )
                    for at in range(0, len(one), PAIRS_AT_ONCE)
                ),
            ]
        )
        for at in self._promising(seconds):
            yield self._with(int(one[at]), int(other[at]))

    def _short(self) -> np.ndarray:
        """The columns that are combined into pairs: the fastest that fit, the fastest whatever memory they take, and
        those that free most bytes per second that they cost."""
        fits_s, roomy_s = self._seconds(self.fits), self._seconds(self.roomy)
        found = [np.argsort(fits_s, kind="stable")[:SHORTLIST], np.argsort(roomy_s, kind="stable")[:SHORTLIST]]
        if np.isfinite(self.state.limit_bytes):
            freed = -self.state.changes()[BYTES]
            frees = np.flatnonzero((freed > 0) & (roomy_s < self.fits.forbidden_s))
            rate = (roomy_s[frees] - self.best_s) / freed[frees]
            found.append(frees[np.argsort(rate, kind="stable")[: SHORTLIST // 2]])
        return np.array(list(dict.fromkeys(np.concatenate(found).tolist())), int)

    def _seconds(self, penalty: Penalty) -> np.ndarray:
        """Seconds by the State of every move of one node (one per column); infinite for a node's present choice."""
        seconds = self.state.score(self.state.totals + self.state.changes(), penalty)
        return np.where(self.choice == np.array(self.best)[self.node], np.inf, seconds)

    def _promising(self, seconds: np.ndarray) -> list[int]:
        """The indices of the moves that are worth pricing (PROMISING), given their `seconds` by the State, the fastest
        first."""
        most_s = PROMISING * float(self.state.score(self.state.totals, self.fits)[0])
        order = np.argsort(seconds, kind="stable")
        found: list[int] = order[seconds[order] < most_s].tolist()
        return found
