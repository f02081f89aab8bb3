"""A step over all choices, bounded from below by prices of what its passes take: a Problem whose costs just add up, for any prices of a polytope (joint.price_polytope).

What a plan computes or waits for beside the quantities of its passes costs as much as anything gains by it. Memory that a plan has no more than `limit` of adds m (bytes - limit)
for every m >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.problem.pass_tables import BACKWARD, COMPUTE, PASSES, SHOWN, PassTables, Table
from autopar.problem.types import Net, Node, Problem

Key = tuple[str, int]  # a scope, and one of its passes
Span = tuple[float, float]
Spans = Mapping[tuple[Key, str], Span]
"""Of a pass and a level of the cluster (all of them: ""), how many times as long as it computes it waits for what takes the level's link (for all collectives)."""
ALL: Span = (0.0, math.inf)


@dataclass(frozen=True, eq=False)
class Room:
    """Bytes of each node's choices and of each net's pairs, of which a plan has no more than `limit` together, those of `Relaxed.again` so many `times`."""

    nodes: Sequence[np.ndarray]
    nets: Sequence[np.ndarray]
    limit: float
    times: float = 1.0


@dataclass(frozen=True, eq=False)
class Sums:
    """What one solution takes: by key the quantities of problem.pass_tables and a one, seconds that nothing changes, and bytes over the limit of each Room."""

    passes: Mapping[Key, np.ndarray]
    own_s: float
    over: np.ndarray


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of each node's choices and of the pairs of each net that counts, and those to be added to what a solution takes by these."""

    node_s: list[np.ndarray]
    net_s: list[np.ndarray]
    more_s: float


@dataclass(eq=False)
class Relaxed:
    """The step of `passing`, with each pass `times` over (none where nothing is said), and seconds of each node's choices and each net's pairs beside them; of solutions whose
    waits are within `spans`. `fixed_s` are on top of all; `again`: by scope of blocks, of how many seconds and bytes its backward has one more (joint.remat_bounds)."""

    passing: PassTables
    times: Mapping[Key, float]
    node_s: Sequence[np.ndarray]
    net_s: Sequence[np.ndarray]
    rooms: Sequence[Room] = ()
    spans: Spans = field(default_factory=dict)
    again: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    fixed_s: float = 0.0

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

    def sums(self, choice: Sequence[int], prices: Mapping[Key, np.ndarray] | None = None, bytes_s: np.ndarray | None = None) -> Sums:
        """What `choice` takes, with the seconds and bytes of `again` that cost least at these prices, or the first ones."""
        passes = {key: np.eye(1, self.passing.width + 1, self.passing.width)[0] for key in self.keys}
        own_s, over = self.fixed_s, -np.array([room.limit for room in self.rooms], float)
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
        for scope, pairs in self.again.items():
            seconds, nbytes = pairs[0] if prices is None else min(pairs, key=lambda pair: self._again_s(scope, pair, prices, bytes_s))
            passes[scope, BACKWARD][[SHOWN, COMPUTE]] += seconds
            over += [room.times * nbytes for room in self.rooms]
        return Sums(passes, own_s, over)

    def _again_s(self, scope: str, pair: tuple[float, float], prices: Mapping[Key, np.ndarray], bytes_s: np.ndarray | None) -> float:
        """What so many seconds and bytes cost at some prices."""
        second = float(prices[scope, BACKWARD][SHOWN] + prices[scope, BACKWARD][COMPUTE])
        byte_s = sum(float(m) * room.times for m, room in zip(bytes_s, self.rooms, strict=True)) if bytes_s is not None else 0.0
        return second * pair[0] + byte_s * pair[1]

    def costs(self, prices: Mapping[Key, np.ndarray], bytes_s: np.ndarray) -> Costs:
        """Of all choices and pairs at `prices` of the quantities, and of a pass as such, and of bytes in each Room."""
        node_s, net_s, up_s = [], [], 0.0
        rooms = [(float(m), room) for m, room in zip(bytes_s, self.rooms, strict=True) if m > 0.0]
        for v, (table, own_s, barred) in enumerate(zip(self.passing.nodes, self.node_s, self._barred, strict=True)):
            cost_s = own_s + _priced(table, prices)
            for m, room in rooms:
                cost_s = cost_s + m * room.nodes[v]
            if barred is not None:
                cost_s = np.where(barred, np.inf, cost_s)
            least_s = min(0.0, float(cost_s.min()))  # negative ones are moved up, which every solution has once
            up_s -= least_s
            node_s.append(cost_s - least_s)
        for t, barred in self._counting.items():
            cost_s = self.net_s[t] + _priced(self.passing.nets[t], prices)
            for m, room in rooms:
                cost_s = cost_s + m * room.nets[t]
            cost_s = np.maximum(cost_s, 0.0)
            net_s.append(cost_s if barred is None else np.where(barred, np.inf, cost_s))
        over_s = sum(float(m) * room.limit for m, room in zip(bytes_s, self.rooms, strict=True))
        fixed_s = self.fixed_s + sum(float(values[-1]) for values in prices.values())
        fixed_s += sum(min(self._again_s(scope, pair, prices, bytes_s) for pair in pairs) for scope, pairs in self.again.items())
        return Costs(node_s, net_s, fixed_s - up_s - over_s)

    def priced(self, costs: Costs) -> Problem:
        """The Problem that has these costs."""
        whole = self.problem
        nodes = [Node(node.name, node.labels, cost_s, np.zeros(len(cost_s)), np.zeros(len(cost_s))) for node, cost_s in zip(whole.nodes, costs.node_s, strict=True)]
        nets = [Net(net.name, net.producer, net.row, net.uses, cost_s, np.zeros_like(cost_s)) for net, cost_s in zip((whole.nets[t] for t in self._counting), costs.net_s, strict=True)]
        return Problem(tuple(nodes), tuple(nets), 0, math.inf, whole.name)

    @cached_property
    def _barred(self) -> list[np.ndarray | None]:
        """The choices of each node that cannot be; None where there are none."""
        return [_some(np.isinf(node.cost_s) | np.isinf(own_s)) for node, own_s in zip(self.problem.nodes, self.node_s, strict=True)]

    @cached_property
    def _counting(self) -> dict[int, np.ndarray | None]:
        """The nets, by number, that take anything at any prices, but none between places; and of each the pairs that cannot be."""
        barred = {t: _some(np.isinf(net.cost_s)) for t, net in enumerate(self.problem.nets) if t not in (self.passing.between or ())}
        return {t: mask for t, mask in barred.items() if mask is not None or self.passing.nets[t].each.any() or self.net_s[t].any() or any(room.nets[t].any() for room in self.rooms)}


def _some(mask: np.ndarray) -> np.ndarray | None:
    """A mask, None where nothing is in it."""
    return mask if mask.any() else None


def _priced(table: Table, prices: Mapping[Key, np.ndarray]) -> np.ndarray:
    priced = [table.each[way] @ prices[table.scope, way][:-1] for way in PASSES if (table.scope, way) in prices]
    return np.asarray(priced[0] + priced[1] if len(priced) == 2 else sum(priced, np.zeros(table.each.shape[1:-1])))


def _add(passes: Mapping[Key, np.ndarray], table: Table, at: object) -> None:
    for way in PASSES:
        if (table.scope, way) in passes:
            passes[table.scope, way][:-1] += table.each[way][at]
