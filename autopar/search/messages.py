"""Messages between nodes and nets of a Problem: a lower bound of costs that just add up (SRMP: Kolmogorov, "A new look
at reweighted message passing", 2015).

Going over the nodes forwards and backwards, each takes the min-marginals of its nets and gives a share back to those
still ahead. The bound is then the sum of every node's least. Messages move costs, so that those of other costs are as
good to begin with: any messages prove something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem.types import Net
from autopar.search.factors import column_marginal, row_marginal

FORBIDDEN = 1e3  # of a time that no good solution exceeds, instead of infinity
MAX_SHARED = 4  # readers that one factor holds; more are split, each part paying its share of the net


@dataclass
class Factor:
    """Part of a net: at most `MAX_SHARED` of its readers, who pay `share` of its cost."""

    net: Net
    share: float
    uses: list[int]
    table: np.ndarray
    messages: list[np.ndarray]  # to the producer [rows], then to each of `uses` [columns]

    def members(self) -> list[int]:
        """Node of each message."""
        return [self.net.producer, *(self.net.uses[u].node for u in self.uses)]

    def layouts(self, slot: int) -> np.ndarray:
        """Row or column of each choice of the member at `slot`."""
        return self.net.row if slot == 0 else self.net.uses[self.uses[slot - 1]].column

    def marginal(self, slot: int) -> np.ndarray:
        """The whole min-marginal of the member at `slot`, by its rows or columns."""
        if len(self.uses) == 1:  # most factors: one table, no readers that share
            return np.asarray(
                np.minimum.reduce(self.table - self.messages[1], 1)
                if slot == 0
                else np.minimum.reduce(self.table - self.messages[0][:, None], 0)
            )
        away = [-m for m in self.messages[1:]]
        if slot == 0:
            return row_marginal(self.table, away)
        away[slot - 1] = np.zeros_like(away[slot - 1])
        return column_marginal(self.table, away, slot - 1, -self.messages[0])


def split(net: Net) -> list[Factor]:
    """The factors of a net."""
    count = len(net.uses)
    parts = [list(range(first, min(first + MAX_SHARED, count))) for first in range(0, count, MAX_SHARED)]
    height, width = net.cost_s.shape
    return [
        Factor(net, len(part) / count, part, net.cost_s, [np.zeros(height), *(np.zeros(width) for _ in part)])
        for part in parts
    ]


@dataclass
class Seat:
    """A node in a factor: `slot` of its message, and whether a later or an earlier node is in the factor too."""

    factor: Factor
    slot: int
    later: bool
    earlier: bool
    layouts: np.ndarray
    # rows or columns that none of the node's choices has any more; None: to be looked at anew
    dead: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.order = np.argsort(self.layouts, kind="stable")  # choices by their layouts, and where each layout begins
        ordered = self.layouts[self.order]
        self.starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
        self.used = ordered[self.starts]

    def collect(self, keep: np.ndarray, big_s: float) -> np.ndarray:
        """Moves the whole min-marginal into the message; what it adds to each choice of the node.

        A row or column that none of the node's choices in `keep` has costs `big_s` from here on: without that the
        others would see a layout nobody can take as free.
        """
        message = self.factor.marginal(self.slot)
        if self.dead is None:
            alive = np.zeros(len(message), bool)
            alive[self.layouts[keep]] = True
            self.dead = np.flatnonzero(~alive)
        if len(self.dead):
            message[self.dead] = -big_s
        self.factor.messages[self.slot] = message
        return np.asarray(message[self.layouts])

    def give(self, spare: np.ndarray) -> None:
        """Gives the factor back what each layout has to spare: the least of its choices, nothing where it has none."""
        message = self.factor.messages[self.slot].copy()
        message[self.used] -= np.minimum.reduceat(spare[self.order], self.starts)
        self.factor.messages[self.slot] = message


class Messages:
    """Those of `factors`; `own` are the costs of each node's choices, of which those in `keep` count, and all others
    cost `big_s`."""

    def __init__(self, factors: Sequence[Factor], own: list[np.ndarray], keep: list[np.ndarray], big_s: float) -> None:
        self.factors, self.own, self.keep, self.big_s = list(factors), own, keep, big_s
        self.least = np.zeros(len(own))
        self.seat()

    def seat(self) -> None:
        """The factors that each node is in, and the share that each of them gets of what it has to give."""
        out: list[list[Seat]] = [[] for _ in self.own]
        for factor in self.factors:
            members = factor.members()
            for slot, v in enumerate(members):
                out[v].append(Seat(factor, slot, max(members) > v, min(members) < v, factor.layouts(slot)))
        self.seats = out
        self.shares = [1.0 / max(sum(s.later for s in seats), sum(s.earlier for s in seats), 1) for seats in out]

    @property
    def value(self) -> float:
        """The bound that the last sweep, a backward one, has found."""
        return float(self.least.sum())

    def sweep(self, *, forwards: bool, look: Callable[[int, np.ndarray], None] | None = None) -> None:
        """One pass over the nodes; `look` is given each node's number and what its choices cost by then."""
        order = range(len(self.own))
        for v in order if forwards else reversed(order):
            total = self.own[v].copy()
            for seat in self.seats[v]:
                total += seat.collect(self.keep[v], self.big_s)
            total[~self.keep[v]] = self.big_s
            self.least[v] = total.min()
            if look is not None:
                look(v, total)
            self._give(v, total - self.least[v], forwards)

    def _give(self, v: int, spare: np.ndarray, forwards: bool) -> None:
        """Gives every net still ahead its share of what node `v` has over its least."""
        part = self.shares[v] * spare
        for seat in self.seats[v]:
            if seat.later if forwards else seat.earlier:
                seat.give(part)

    def drop(self, v: int, worse: np.ndarray) -> None:
        """Choices of a node that do not count any more."""
        self.keep[v] &= ~worse
        self.own[v][worse] = self.big_s
        for seat in self.seats[v]:
            seat.dead = None

    def decode(self) -> tuple[int, ...]:
        """Node by node, the best given the producers already placed and the messages of nets further on."""
        choice: list[int] = [-1] * len(self.own)
        asked: list[set[int]] = [set() for _ in self.factors]
        index = {id(f): i for i, f in enumerate(self.factors)}
        for v, own in enumerate(self.own):
            total = own.copy()
            for seat in self.seats[v]:
                factor, slot, layouts = seat.factor, seat.slot, seat.layouts
                producer = choice[factor.net.producer]
                if slot == 0 or producer < 0:
                    total += factor.messages[slot][layouts]
                else:
                    row = factor.table[factor.net.row[producer]].copy()
                    row[sorted(asked[index[id(factor)]])] = 0.0
                    total += row[layouts]
            choice[v] = int(total.argmin())
            for seat in self.seats[v]:
                if seat.slot > 0:
                    asked[index[id(seat.factor)]].add(int(seat.layouts[choice[v]]))
        return tuple(choice)
