"""Message passing: a lower bound of a Problem whose cost is a sum over nodes and nets (SRMP: Kolmogorov, "A new look at
reweighted message passing", 2015). Called by search.dual and search.recosted.

A message moves cost from a net to a node, by layout; it changes no solution's total cost. A sweep visits the nodes in
order, or in reverse. Each node takes the whole min-marginal of every net that it is in, and gives a share of what its
choices cost above the cheapest one back to the nets that have nodes still to be visited. After a sweep the bound is the
sum over nodes of the cost of their cheapest choice. Any messages give a valid bound, so those found at some costs are a
good start at similar costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem.types import Groups, Net
from autopar.search.factors import column_marginal, row_marginal

FORBIDDEN = 1e3  # the cost of a forbidden choice, as a multiple of a time that no good solution exceeds
MAX_SHARED = 4  # readers of one factor; a net with more is several factors, each with its share of the cost


@dataclass
class Factor:
    """Part of a net: the producer and at most MAX_SHARED of the readers, `uses`, which are charged with `share` of its
    cost `table` [rows, columns]. `messages`: to the producer [rows], then to each of `uses` [columns]."""

    net: Net
    share: float
    uses: list[int]
    table: np.ndarray
    messages: list[np.ndarray]

    def members(self) -> list[int]:
        """The nodes of the factor in the order of `messages`: the producer, then the readers."""
        return [self.net.producer, *(self.net.uses[u].node for u in self.uses)]

    def layouts(self, slot: int) -> tuple[np.ndarray, Groups]:
        """[choices] for each choice of the member number `slot` its row (of the producer) or column; and the choices by
        these."""
        if slot == 0:
            return self.net.row, self.net.groups
        use = self.net.uses[self.uses[slot - 1]]
        return use.column, use.groups

    def marginal(self, slot: int) -> np.ndarray:
        """The min-marginal of the member number `slot`, by row or column: the least cost of the factor with that layout
        fixed, less the messages to the other members."""
        if len(self.uses) == 1:  # most factors: one table, no readers that share
            rest = self.table - (self.messages[1] if slot == 0 else self.messages[0][:, None])
            least: np.ndarray = np.minimum.reduce(rest, 1 - slot)
            return least
        away = [-m for m in self.messages[1:]]
        if slot == 0:
            return row_marginal(self.table, away)
        away[slot - 1] = np.zeros_like(away[slot - 1])
        return column_marginal(self.table, away, slot - 1, -self.messages[0])


def split(net: Net) -> list[Factor]:
    """The factors of a net, with messages of 0."""
    count = len(net.uses)
    parts = [list(range(first, min(first + MAX_SHARED, count))) for first in range(0, count, MAX_SHARED)]
    height, width = net.cost_s.shape
    return [
        Factor(net, len(part) / count, part, net.cost_s, [np.zeros(height), *(np.zeros(width) for _ in part)])
        for part in parts
    ]


@dataclass
class Seat:
    """The membership of one node in one factor: `slot` is its number there, `layouts` [choices] as Factor.layouts has
    it, and `groups` its choices by these. `later`, `earlier`: whether the factor also has a node with a higher, or a
    lower, number. `dead`: the rows or columns that no choice of the node has that is kept; None where they are to be
    found again."""

    factor: Factor
    slot: int
    later: bool
    earlier: bool
    layouts: np.ndarray
    groups: Groups
    dead: np.ndarray | None = None

    def collect(self, keep: np.ndarray, big_s: float) -> np.ndarray:
        """Set the message to the whole min-marginal. Returns what that adds to the cost of each choice of the node.

        A row or column that no choice in `keep` has costs `big_s` from here on. Otherwise other members would see a
        layout that nobody can take, at no cost.
        """
        message = self.factor.marginal(self.slot)
        if self.dead is None:  # found once, as long as all choices are kept
            alive = np.zeros(len(message), bool)
            alive[self.layouts[keep]] = True
            self.dead = np.flatnonzero(~alive)
        if len(self.dead):
            message[self.dead] = -big_s
        self.factor.messages[self.slot] = message
        return np.asarray(message[self.layouts])

    def give(self, spare: np.ndarray) -> None:
        """Give cost back to the factor: `spare` [choices] is what each choice of the node has to give; a layout gives
        the least of its choices, and nothing where it has none."""
        groups, message = self.groups, self.factor.messages[self.slot]
        given = np.minimum.reduceat(spare[groups.order], groups.starts)
        if len(given) == len(message):  # each layout has a choice
            message = message - given
        else:
            message = message.copy()
            message[groups.used] -= given
        self.factor.messages[self.slot] = message


class Messages:
    """The messages of `factors`. `own` [nodes][choices] are the costs of the nodes themselves; choices outside of
    `keep` cost `big_s`. `least` [nodes] is the cost of each node's cheapest choice in the last sweep."""

    def __init__(self, factors: Sequence[Factor], own: list[np.ndarray], keep: list[np.ndarray], big_s: float) -> None:
        self.factors, self.own, self.keep, self.big_s = list(factors), own, keep, big_s
        self.least = np.zeros(len(own))
        self._dropped: list[np.ndarray | None] = [None] * len(own)  # those outside of `keep`; None: to be found again
        self.seat()

    def seat(self) -> None:
        """Find the factors of each node (`seats`), and the share of its spare cost that it gives to each of them
        (`shares`)."""
        out: list[list[Seat]] = [[] for _ in self.own]
        for factor in self.factors:
            members = factor.members()
            for slot, v in enumerate(members):
                out[v].append(Seat(factor, slot, max(members) > v, min(members) < v, *factor.layouts(slot)))
        self.seats = out
        self.shares = [1.0 / max(sum(s.later for s in seats), sum(s.earlier for s in seats), 1) for seats in out]

    @property
    def value(self) -> float:
        """The bound of the last sweep, which must have been a backward one."""
        return float(self.least.sum())

    def sweep(self, *, forwards: bool, look: Callable[[int, np.ndarray], None] | None = None) -> None:
        """Visit all nodes once, in order or (`forwards` False) in reverse. `look`, where given, is called for each node
        with its number and [choices] the cost of its choices after all messages to it."""
        order = range(len(self.own))
        for v in order if forwards else reversed(order):
            total = self.own[v].copy()
            for seat in self.seats[v]:
                total += seat.collect(self.keep[v], self.big_s)
            if (dropped := self._dropped[v]) is None:
                dropped = self._dropped[v] = np.flatnonzero(~self.keep[v])
            if len(dropped):
                total[dropped] = self.big_s
            self.least[v] = np.minimum.reduce(total)
            if look is not None:
                look(v, total)
            self._give(v, total - self.least[v], forwards=forwards)

    def _give(self, v: int, spare: np.ndarray, *, forwards: bool) -> None:
        """Give a share of `spare` [choices] to each factor of node `v` that has a node still to be visited. `spare` is
        the cost of each choice above that of the cheapest one."""
        part = self.shares[v] * spare
        for seat in self.seats[v]:
            if seat.later if forwards else seat.earlier:
                seat.give(part)

    def drop(self, v: int, worse: np.ndarray) -> None:
        """Take the choices `worse` (bool) of node `v` out of `keep`."""
        self.keep[v] &= ~worse
        self._dropped[v] = None
        self.own[v][worse] = self.big_s
        for seat in self.seats[v]:
            seat.dead = None

    def decode(self) -> tuple[int, ...]:
        """A solution: node by node the choice of least cost, given the choices of the nodes before it, and with the
        messages in place of nodes that have none yet. May use forbidden pairs."""
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
