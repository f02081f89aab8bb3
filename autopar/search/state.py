"""A solution that local search changes, with the cost of every possible move of a single node. Called by the searches,
and by pipeline.honing_state with other seconds.

A column of totals is [exposed seconds, bytes, forbidden pairs, comm - hide of group 0, 1, ..., work in lane 0, 1, ...].
Every node adds the column of its choice to them, every net the distinct columns that its readers ask for. The change of
totals that each choice of each node would make is cached. A move invalidates only the entries of its neighbours, so
that it is cheap to ask which nodes could be improved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.problem.types import Net, Picks, Problem

TOLERANCE = 1e-12  # relative: differences below are rounding
SECONDS, BYTES, FORBIDDEN = range(3)
FIXED = 3
"""Seconds, bytes and forbidden pairs; the groups follow."""

KNOWN = 16
"""Results that are kept at most of each net that a node touches: neighbours change between few choices."""


@dataclass(frozen=True)
class Penalty:
    """Seconds charged per byte over the limit and per forbidden pair."""

    byte_s: float
    forbidden_s: float


class _Touch(NamedTuple):
    """A net that a node produces or reads: its number, whether the node produces it, the columns that the node asks for
    by choice, and the other readers with theirs. `known`: the results of `_Touch` so far (State._added_by), by the row
    in which the net is made (-1: by the node itself), then the columns that others ask for."""

    net: int
    produced: bool
    own: list[np.ndarray]
    others: list[tuple[int, list[int]]]
    known: dict[tuple[int, ...], np.ndarray]


class State:
    """One choice per node (-1: not placed yet, its nets do not count) and its totals."""

    def __init__(self, problem: Problem, choice: Picks | list[int]) -> None:
        self.problem, self.limit_bytes = problem, problem.memory_limit_bytes
        self.tables = [self._net_features(t) for t in range(len(problem.nets))]
        self.slots = [self._slots(t) for t in range(len(problem.nets))]
        # of each net, the slots behind the FIXED ones, side by side (None: there are none)
        self.tails = [None if isinstance(slots, slice) else slice(slots[FIXED], slots[-1] + 1) for slots in self.slots]
        # lists: read one by one
        self.columns = [[(use.node, use.asks) for use in net.uses] for net in problem.nets]
        self.rows = [net.makes for net in problem.nets]
        self.own = [self._node_features(v) for v in range(len(problem.nodes))]
        self.touching: list[list[_Touch]] = [[] for _ in problem.nodes]
        for t, net in enumerate(problem.nets):
            for v in sorted({net.producer, *(use.node for use in net.uses)}):
                others = [(node, column) for node, column in self.columns[t] if node != v]
                self.touching[v].append(
                    _Touch(t, net.producer == v, [use.column for use in net.uses if use.node == v], others, {})
                )
        self.near = [
            sorted({w for touch in near for w in _members(problem.nets[touch.net])} - {v})
            for v, near in enumerate(self.touching)
        ]
        self.starts = np.cumsum([0, *(own.shape[1] for own in self.own)])
        # by choice of every node: what it would add to the totals
        self._changes = np.zeros((self._rows, int(self.starts[-1])))
        self._stale = set(range(len(problem.nodes)))  # nodes with a neighbour that has moved
        self.choice = [-1] * len(problem.nodes)
        self.reset(choice)

    def reprice(self, problem: Problem) -> None:
        """Take the costs of `problem`, which differs from the present one in costs alone. Totals are wrong until
        `reset`."""
        self.problem = problem
        self.tables = [self._net_features(t) for t in range(len(problem.nets))]
        self.own = [self._node_features(v) for v in range(len(problem.nodes))]
        self._stale = set(range(len(problem.nodes)))
        for near in self.touching:
            for touch in near:
                touch.known.clear()
        self.__dict__.pop("scale_s", None)

    def reset(self, choice: Picks | list[int]) -> None:
        """Take `choice` and recompute the totals."""
        for v, (before, c) in enumerate(zip(self.choice, choice, strict=True)):
            if before != c:
                self._stale.update((v, *self.near[v]))
        self.choice = list(choice)
        self.totals = np.zeros((self._rows, 1))
        totals = self.totals[:, 0]
        for v, c in enumerate(choice):
            if c >= 0:
                totals += self.own[v][:, c]
        for t, (net, table) in enumerate(zip(self.problem.nets, self.tables, strict=True)):
            if choice[net.producer] >= 0 and (asked := self._asked(self.columns[t])):
                row = self.rows[t][choice[net.producer]]
                self._add(t, totals, table[:, row, asked[0]] if len(asked) == 1 else table[:, row, asked].sum(1))

    def move(self, v: int, c: int) -> None:
        """Move node `v` to choice `c`."""
        changes = self._changes_of(v)
        self.totals = self.totals + changes[:, c : c + 1]
        changes -= changes[:, c : c + 1].copy()
        self.choice[v] = c
        self._stale.update(self.near[v])

    def after(self, v: int, choices: np.ndarray) -> np.ndarray:
        """[totals, choices]: the totals after moving node `v` to each of `choices`."""
        return np.asarray(self.totals + self._changes_of(v)[:, choices])

    def after_all(self, v: int) -> np.ndarray:
        """[totals, choices]: the totals after moving node `v` to each of its choices."""
        return np.asarray(self.totals + self._changes_of(v))

    def restless(self, penalty: Penalty) -> np.ndarray:
        """For each node, whether a move of it alone would improve the score; all nodes must be placed."""
        best = np.minimum.reduceat(self.score(self.totals + self.changes(), penalty), self.starts[:-1])
        now = float(self.score(self.totals, penalty)[0])
        return np.asarray(best < now - TOLERANCE * abs(now))

    def changes(self) -> np.ndarray:
        """What each choice of each node would add to the totals, one column after the other (`starts`); all nodes are
        placed."""
        for v in list(self._stale):
            self._changes_of(v)
        return self._changes

    def _changes_of(self, v: int) -> np.ndarray:
        """What each choice of node `v` would add to the totals, a view."""
        changes = self._changes[:, self.starts[v] : self.starts[v + 1]]
        if v in self._stale:
            whole, now = self._count(v), self.choice[v]
            np.subtract(whole, whole[:, now : now + 1] if now >= 0 else self._idle(v), out=changes)
            self._stale.discard(v)
        return changes

    def score(self, totals: np.ndarray, penalty: Penalty) -> np.ndarray:
        """Seconds of each column, penalties included."""
        over = np.maximum(0.0, totals[BYTES] - self.limit_bytes * (1 + 1e-12))
        return np.asarray(self.seconds(totals) + penalty.byte_s * over + penalty.forbidden_s * totals[FORBIDDEN])

    def seconds(self, totals: np.ndarray) -> np.ndarray:
        """Seconds of each column."""
        groups = FIXED + self.problem.groups
        seconds = totals[SECONDS] + np.maximum(0.0, totals[FIXED:groups]).sum(0)
        return np.asarray(seconds + self.problem.abreast_s(totals[groups:]) if self.problem.lanes else seconds)

    def feasible(self) -> bool:
        """Whether nothing forbidden is used and memory fits."""
        return self.totals[FORBIDDEN, 0] < 0.5 and self.totals[BYTES, 0] <= self.limit_bytes * (1 + 1e-12)

    @property
    def _rows(self) -> int:
        return FIXED + self.problem.groups + len(self.problem.lanes)

    def _idle(self, v: int) -> np.ndarray:
        """What the nets that `v` reads cost while `v` has no choice: the columns that other readers ask for."""
        out = np.zeros((len(self.totals), 1))
        for t, produced, _, others, _ in self.touching[v]:
            maker = self.choice[self.problem.nets[t].producer]
            if not produced and maker >= 0:
                out[self.slots[t], 0] += self.tables[t][:, self.rows[t][maker], self._asked(others)].sum(1)
        return out

    def _count(self, v: int) -> np.ndarray:
        """[totals, choices]: what node `v` and its nets add under each of its choices, all other nodes unchanged."""
        out = self.own[v].copy()
        for touch in self.touching[v]:
            maker = -1
            if not touch.produced and (maker := self.choice[self.problem.nets[touch.net].producer]) < 0:
                continue
            row = -1 if touch.produced else self.rows[touch.net][maker]
            columns = self._asked(touch.others)
            key = (row, *columns)
            added = touch.known.get(key)
            if added is None:
                if len(touch.known) == KNOWN:
                    touch.known.clear()
                added = touch.known[key] = self._added_by(touch, row, columns)
            self._add(touch.net, out, added)
        return out

    def _add(self, t: int, totals: np.ndarray, added: np.ndarray) -> None:
        """Add to `totals` what net `t` adds to its slots."""
        totals[:FIXED] += added[:FIXED]
        if (tail := self.tails[t]) is not None:
            totals[tail] += added[FIXED:]

    def _added_by(self, touch: _Touch, row: int, columns: list[int]) -> np.ndarray:
        """[slots, choices]: what a net adds under each choice of the node that it touches, made in `row` (-1: as the
        node makes it), when others ask for `columns`."""
        table = self.tables[touch.net]
        if row >= 0:
            return _reading(table[:, row], touch.own, columns)
        asked = table[:, :, columns[0]] if len(columns) == 1 else table[:, :, columns].sum(2)
        return np.asarray(asked[:, self.problem.nets[touch.net].row])

    def _asked(self, readers: list[tuple[int, list[int]]]) -> list[int]:
        """The distinct columns that the placed ones of `readers` ask for."""
        if not readers:
            return []
        choice = self.choice
        asked = {column[choice[node]] for node, column in readers if choice[node] >= 0}
        return sorted(asked) if len(asked) > 1 else [*asked]

    @cached_property
    def scale_s(self) -> float:
        """`scale_s` of the problem, computed once."""
        return scale_s(self.problem)

    def _slots(self, t: int) -> slice | np.ndarray:
        """The totals that net `t` adds to: the FIXED ones, and others that are side by side."""
        group = self.problem.nets[t].group
        return slice(FIXED) if group < 0 else np.array([*range(FIXED), FIXED + group])

    def _node_features(self, v: int) -> np.ndarray:
        """[totals, choices]: what each choice of node `v` adds by itself."""
        node, own = self.problem.nodes[v], np.zeros((self._rows, len(self.problem.nodes[v].cost_s)))
        forbidden = np.isinf(node.cost_s)
        own[SECONDS], own[BYTES], own[FORBIDDEN] = (
            np.where(forbidden, 0.0, node.in_lane(-1)),
            node.memory_bytes,
            forbidden,
        )
        for lane in () if node.lane is None else np.unique(node.lane[node.lane >= 0]):
            own[FIXED + self.problem.groups + lane] = np.where(forbidden, 0.0, node.in_lane(lane))
        if node.group >= 0:
            own[FIXED + node.group] -= node.hide_s
        return own

    def _net_features(self, t: int) -> np.ndarray:
        """[seconds exposed, bytes, forbidden] and for a net of a group [seconds that can hide] of every entry of the
        tables of net `t`."""
        net = self.problem.nets[t]
        forbidden = np.isinf(net.cost_s)
        found = np.empty((FIXED + (net.group >= 0), *net.cost_s.shape))
        found[SECONDS], found[BYTES], found[FORBIDDEN] = net.shown_s, net.memory_bytes, forbidden
        found[SECONDS][forbidden] = 0.0
        if net.group >= 0:
            found[FIXED] = net.hideable_s
        return found


def _members(net: Net) -> list[int]:
    """The nodes of a net: the producer, then the readers."""
    return [net.producer, *(use.node for use in net.uses)]


def _reading(row: np.ndarray, own: list[np.ndarray], columns: list[int]) -> np.ndarray:
    """Cost of a net, one column for each choice of a reader whose uses ask for the columns `own`, when others ask for
    `columns`. `row` is [slots, columns]."""
    if not columns and len(own) == 1:
        return row[:, own[0]]
    rest = row.copy()
    rest[:, columns] = 0.0  # there anyway
    total = rest[:, own[0]] + row[:, columns].sum(1)[:, None]
    for i, column in enumerate(own[1:], start=1):
        new = np.all([column != other for other in own[:i]], axis=0)
        total += rest[:, column] * new
    return np.asarray(total)


def scale_s(problem: Problem) -> float:
    """Seconds that no feasible solution exceeds: the sum of the largest finite entry of every table; 1 where that sum
    is 0."""
    total = 0.0
    for node in problem.nodes:
        total += _largest(np.abs(node.cost_s))
    for net in problem.nets:
        total += _largest(net.cost_s) * len(net.uses)
    return total or 1.0


def _largest(seconds: np.ndarray) -> float:
    """The largest finite entry of `seconds`, none of which is negative; 0 where there is none."""
    most = float(seconds.max(initial=0.0))
    return most if most < np.inf else float(seconds[np.isfinite(seconds)].max(initial=0.0))
