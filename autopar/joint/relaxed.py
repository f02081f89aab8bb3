"""A step over all choices, bounded from below by prices of what its passes take: a Problem whose costs just add up, for any prices of a polytope.

What one pass of a scope takes (problem.hiding.together_s) is at least, with S all that is shown, C compute, W collectives that are waited for, and A + B what
is in the background of each mesh axis a (problem.passing), the least of

    S + c sum x_a + tail + sum late_a + extra    where
        x_a + y_a + tail + late_a >= A_a + B_a    each axis moves while compute runs, while others are waited for, when the work is done, or is waited for
        x_a <= C + c sum x                        compute lasts as long: c is the share that each collective behind it takes
        y_a <= W + sum late + extra               waits last as long, `extra` for links that are shared

By duality it is no less than S + sum over a of

    p_a (A_a + B_a) - e_a C - w_a W    for all    p_a + c sum e <= c + e_a,  p_a <= w_a,  sum p <= 1,  p_a + sum w <= 1

and not negative ones. On devices that compute and move with the same cores (no overlap) all of A and B is shown.
Memory that a plan has no more than `limit` of adds m (bytes - limit) for every m >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.problem.passing import COMPUTE, PASSES, WAITED, Passing, Table
from autopar.problem.types import Net, Node, Problem
from autopar.search.model import Linear

Key = tuple[str, int]  # a scope, and one of its passes


@dataclass(frozen=True, eq=False)
class Room:
    """Bytes of each node's choices and of each net's pairs, of which a plan has no more than `limit` together."""

    nodes: Sequence[np.ndarray]
    nets: Sequence[np.ndarray]
    limit: float


@dataclass(frozen=True, eq=False)
class Sums:
    """What one solution takes: by key the quantities of problem.passing, seconds that nothing changes, and bytes over the limit of each Room."""

    passes: Mapping[Key, np.ndarray]
    own_s: float
    over: np.ndarray


@dataclass(eq=False)
class Relaxed:
    """The step of `passing`, with its forward and backward `times` over, and seconds of each node's choices and each net's pairs beside them."""

    passing: Passing
    times: tuple[float, float]
    node_s: Sequence[np.ndarray]
    net_s: Sequence[np.ndarray]
    rooms: Sequence[Room] = ()

    @property
    def problem(self) -> Problem:
        """What is relaxed."""
        return self.passing.model.problem

    @cached_property
    def keys(self) -> list[Key]:
        """Scopes and passes in which anything may be in the background."""
        return [(scope, way) for scope in self.passing.scopes for way in PASSES]

    @property
    def hides(self) -> bool:
        """Whether anything hides at all."""
        return self.passing.model.prices.overlap > 0.0

    def sums(self, choice: Sequence[int]) -> Sums:
        """What `choice` takes."""
        passes = {key: np.zeros(self.passing.width) for key in self.keys}
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
        """The Problem at `prices` of the quantities and of bytes in each Room, and what is to be added to its time."""
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
        return Problem(tuple(nodes), tuple(nets), 0, math.inf, whole.name), -sum(up_s) - over_s


def _priced(table: Table, prices: Mapping[Key, np.ndarray]) -> np.ndarray:
    return np.asarray(sum(table.each[way] @ prices[table.scope, way] for way in PASSES))


def _add(passes: Mapping[Key, np.ndarray], table: Table, at: object) -> None:
    for way in PASSES:
        passes[table.scope, way][:] += table.each[way][at]


class Polytope:
    """The columns p, e, w of one pass in a linear program, and what they make of its quantities: `taken[quantity, column]`."""

    def __init__(self, model: Linear, relaxed: Relaxed) -> None:
        passing, self.axes = relaxed.passing, relaxed.passing.axes
        self.model = model
        self.columns = model.add_columns(np.zeros(3 * self.axes), np.zeros(3 * self.axes))
        self.p, self.e, self.w = self.columns.reshape(3, self.axes).tolist()
        self.taken = np.zeros((passing.width, 3 * self.axes))
        for a in range(self.axes):
            self.taken[[passing.ahead(a), passing.behind(a), passing.leaf(a)], a] = 1.0
            self.taken[COMPUTE, self.axes + a] = self.taken[WAITED, 2 * self.axes + a] = -1.0
        if relaxed.hides:
            self._hidden(passing.model.prices.contention)
        else:
            for a in range(self.axes):
                self._row({self.p[a]: 1.0}, 1.0)

    def _hidden(self, contention: float) -> None:
        for a in range(self.axes):
            self._row({self.p[a]: 1.0, **dict.fromkeys(self.e, contention), self.e[a]: contention - 1.0}, contention)
            self._row({self.p[a]: 1.0, self.w[a]: -1.0}, 0.0)
            self._row({self.p[a]: 1.0, **dict.fromkeys(self.w, 1.0)}, 1.0)
        self._row(dict.fromkeys(self.p, 1.0), 1.0)

    def _row(self, terms: Mapping[int, float], upper: float) -> None:
        row = self.model.add_rows(1, -math.inf, upper)
        self.model.add_entries(np.full(len(terms), row), np.array(list(terms)), np.array(list(terms.values())))
