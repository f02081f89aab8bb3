"""A step over all choices, bounded from below by prices of what its passes take: a Problem whose costs just add up, for any prices of a polytope.

What one pass of a scope takes (problem.hiding.together_s) is at least, with S all that is shown, C compute, W collectives that are waited for, Q = A + B + L what
is in the background of each mesh axis a (problem.passing), the least of

    S + c sum x_a + tail + sum late_a + extra    where
        x_a + y_a + tail + late_a >= Q_a          each axis moves while compute runs, while others are waited for, when the work is done, or is waited for
        x_a <= C + c sum x                        compute lasts as long: c is the share that each collective behind it takes
        y_a <= W + sum late + extra               waits last as long, `extra` for links that are shared
        y_a <= u (1 - c) x_a + sum late + extra   where W <= u C: the work is spread evenly, so that what runs under waits runs under compute too
        late_a >= L_a - H_a                       of leaves that are gathered once per step some can be ahead (Passing.leaves_s)

By duality it is no less than S + sum over a of

    p_a Q_a - e_a C - (w_a) W + l_a (L_a - H_a)    for all    p_a + c sum e + u (1 - c) r_a <= c + e_a,  p_a <= w_a + r_a,  sum p <= 1,  p_a + l_a + sum (w + r) <= 1

and not negative ones; gathers of one block in a backward are taken at the lower price of p_a there and in what is outside of blocks. Of solutions with W between t C and u C (`spans`) it is no less with any m (t C - W) + n (W - u C) added, too; no quantity may get a negative
price by that. What a plan computes or waits for beside these quantities costs as much as anything gains by it.

On devices that compute and move with the same cores (no overlap) all of Q is shown. Memory that a plan has no more than `limit` of adds m (bytes - limit) for every m >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.problem.passing import BACKWARD, COMPUTE, FORWARD, PASSES, WAITED, Passing, Table
from autopar.problem.types import Net, Node, Problem
from autopar.search.model import Linear

Key = tuple[str, int]  # a scope, and one of its passes
Span = tuple[float, float]
ALL: Span = (0.0, math.inf)


@dataclass(frozen=True, eq=False)
class Room:
    """Bytes of each node's choices and of each net's pairs, of which a plan has no more than `limit` together."""

    nodes: Sequence[np.ndarray]
    nets: Sequence[np.ndarray]
    limit: float


@dataclass(frozen=True, eq=False)
class Sums:
    """What one solution takes: by key the quantities of problem.passing and a one, seconds that nothing changes, and bytes over the limit of each Room."""

    passes: Mapping[Key, np.ndarray]
    own_s: float
    over: np.ndarray


@dataclass(eq=False)
class Relaxed:
    """The step of `passing`, with each pass `times` over (none where nothing is said), and seconds of each node's choices and each net's pairs beside them; of solutions that wait for
    collectives between so and so many times as long as they compute, where `spans` says so of a pass."""

    passing: Passing
    times: Mapping[Key, float]
    node_s: Sequence[np.ndarray]
    net_s: Sequence[np.ndarray]
    rooms: Sequence[Room] = ()
    spans: Mapping[Key, Span] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """What is relaxed."""
        return self.passing.model.problem

    @cached_property
    def keys(self) -> list[Key]:
        """The passes that count."""
        return [(scope, way) for scope in self.passing.scopes for way in PASSES if self.times.get((scope, way), 0.0) > 0.0]

    @property
    def hides(self) -> bool:
        """Whether anything hides at all."""
        return self.passing.model.prices.overlap > 0.0

    def sums(self, choice: Sequence[int]) -> Sums:
        """What `choice` takes."""
        passes = {key: np.eye(1, self.passing.width + 1, self.passing.width)[0] for key in self.keys}
        own_s, over = 0.0, -np.array([room.limit for room in self.rooms], float)
        for v, c in enumerate(choice):
            own_s += float(self.node_s[v][c])
            over += [float(room.nodes[v][c]) for room in self.rooms]
            _add(passes, self.passing.nodes[v], np.s_[c])
        for t, net in enumerate(self.problem.nets):
            row = int(net.row[choice[net.producer]])
            for column in sorted({int(use.column[choice[use.node]]) for use in net.uses}):
                own_s += float(self.net_s[t][row, column])
                over += [float(room.nets[t][row, column]) for room in self.rooms]
                _add(passes, self.passing.nets[t], np.s_[row, column])
        return Sums(passes, own_s, over)

    def priced(self, prices: Mapping[Key, np.ndarray], bytes_s: np.ndarray) -> tuple[Problem, float]:
        """The Problem at `prices` of the quantities, and of a pass as such, and of bytes in each Room, and what is to be added to its time."""
        whole = self.problem
        nodes, nets = [], []
        for v, (node, table) in enumerate(zip(whole.nodes, self.passing.nodes, strict=True)):
            cost_s = self.node_s[v] + _priced(table, prices) + sum(m * room.nodes[v] for m, room in zip(bytes_s, self.rooms, strict=True))
            none = np.zeros(len(cost_s))
            nodes.append(Node(node.name, node.labels, np.where(np.isinf(node.cost_s), np.inf, cost_s), none, none))
        for t, (net, table) in enumerate(zip(whole.nets, self.passing.nets, strict=True)):
            if t in (self.passing.between or ()):
                continue
            cost_s = self.net_s[t] + _priced(table, prices) + sum(m * room.nets[t] for m, room in zip(bytes_s, self.rooms, strict=True))
            cost_s = np.where(np.isinf(net.cost_s), np.inf, np.maximum(cost_s, 0.0))
            if cost_s.any():
                nets.append(Net(net.name, net.producer, net.row, net.uses, cost_s, np.zeros_like(cost_s)))
        # negative node costs are moved up, which every solution has once
        up_s = [max(0.0, -float(node.cost_s.min())) for node in nodes]
        nodes = [Node(node.name, node.labels, node.cost_s + up, node.memory_bytes, node.hide_s) for node, up in zip(nodes, up_s, strict=True)]
        over_s = sum(float(m) * room.limit for m, room in zip(bytes_s, self.rooms, strict=True))
        fixed_s = sum(float(values[-1]) for values in prices.values())
        return Problem(tuple(nodes), tuple(nets), 0, math.inf, whole.name), fixed_s - sum(up_s) - over_s


def _priced(table: Table, prices: Mapping[Key, np.ndarray]) -> np.ndarray:
    priced = [table.each[way] @ prices[table.scope, way][:-1] for way in PASSES if (table.scope, way) in prices]
    return np.asarray(sum(priced, np.zeros(table.each.shape[1:-1])))


def _add(passes: Mapping[Key, np.ndarray], table: Table, at: object) -> None:
    for way in PASSES:
        if (table.scope, way) in passes:
            passes[table.scope, way][:-1] += table.each[way][at]


class Polytope:
    """The columns of one pass in a linear program, and what they make of its quantities: `taken[quantity, column]`."""

    def __init__(self, model: Linear, relaxed: Relaxed, key: Key, top: Polytope | None = None) -> None:
        """Of the pass `key`; `top` is that of what is outside of blocks, in which gathers of one block may begin."""
        self.model, self.passing = model, relaxed.passing
        self.axes = range(self.passing.axes)
        self.columns = np.zeros(0, int)
        self.taken = np.zeros((self.passing.width + 1, 0))
        first = self._first(key) if relaxed.hides else 0.0
        self.p = [self._column({self.passing.ahead(a): 1.0 - first, self.passing.behind(a): 1.0, self.passing.leaf(a): 1.0}) for a in self.axes]
        if first and top is not None:
            for a, p in enumerate(self.p):
                earlier = self._column({self.passing.ahead(a): first})
                self._row({earlier: 1.0, p: -1.0}, 0.0)
                self._row({earlier: 1.0, top.p[a]: -1.0}, 0.0)
        if relaxed.hides:
            self._hidden(relaxed.passing.model.prices.contention, self._ahead_s(key), *relaxed.spans.get(key, ALL))
        else:
            for p in self.p:
                self._row({p: 1.0}, 1.0)

    def _first(self, key: Key) -> float:
        """The share of one block, whose gathers may begin under what is in front of a backward that follows its forward (pipeline.passes)."""
        scope, way = key
        return 1.0 / self.passing.model.links[0].program.runs[scope].count if scope and way == BACKWARD and not self.passing.late else 0.0

    def _ahead_s(self, key: Key) -> np.ndarray | None:
        """By axis the seconds of leaves that can be ahead; None where there are none of them."""
        scope, way = key
        most_s = self.passing.leaves_s.get(scope) if way == FORWARD else None
        return most_s if most_s is not None and most_s.any() else None

    def _hidden(self, contention: float, ahead_s: np.ndarray | None, least: float, most: float) -> None:
        axes, even = self.axes, math.isfinite(most)
        e = [self._column({COMPUTE: -1.0}) for _ in axes]
        w = [self._column({WAITED: -1.0}) for _ in axes]
        r = [self._column({}) for _ in axes if even]
        late = [self._column({self.passing.leaf(a): 1.0, self.passing.width: -float(ahead_s[a])}) for a in axes if ahead_s is not None]
        over = self._column({COMPUTE: -most, WAITED: 1.0}) if even else None
        under = self._column({COMPUTE: least, WAITED: -1.0})
        waiting = dict.fromkeys([*w, *r], 1.0)
        for a, p in enumerate(self.p):
            self._row({p: 1.0, **dict.fromkeys(e, contention), e[a]: contention - 1.0, **({r[a]: most * (1.0 - contention)} if even else {})}, contention)
            self._row({p: 1.0, w[a]: -1.0, **({r[a]: -1.0} if even else {})}, 0.0)
            self._row({p: 1.0, **waiting, **({late[a]: 1.0} if late else {})}, 1.0)
        self._row(dict.fromkeys(self.p, 1.0), 1.0)
        self._row(dict.fromkeys(e, 1.0), 1.0)
        self._row({**waiting, under: 1.0, **({over: -1.0} if over is not None else {})}, 1.0)  # what is waited for gains nothing, nor does compute
        self._row({**dict.fromkeys(e, 1.0), under: -least, **({over: most} if over is not None else {})}, 1.0)

    def _column(self, taken: Mapping[int, float]) -> int:
        """A column of what it makes of quantities; its number."""
        column = self.model.add_columns(np.zeros(1), np.zeros(1))
        self.columns = np.append(self.columns, column)
        values = np.zeros((len(self.taken), 1))
        values[list(taken), 0] = list(taken.values())
        self.taken = np.append(self.taken, values, 1)
        return int(column[0])

    def _row(self, terms: Mapping[int, float], upper: float) -> None:
        row = self.model.add_rows(1, -math.inf, upper)
        self.model.add_entries(np.full(len(terms), row), np.array(list(terms)), np.array(list(terms.values())))
