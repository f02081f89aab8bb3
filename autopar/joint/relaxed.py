"""A step bounded from below by a Problem whose costs are additive: the Lagrangian relaxation of the price of a step as
it runs. Made by relaxed_steps, bounded by cutting_planes.

The seconds of a pass are a convex function of a few quantities that add up over nodes and nets (problem.pass_tables).
Any prices of these quantities in a polytope (joint.price_polytope) give a linear function below it. With them, each
choice has a cost of its own, and the optimum of that Problem is a lower bound for all solutions. A memory limit adds m
(bytes - limit) for a dual price m >= 0 in seconds per byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.joint import block_chains
from autopar.joint.block_chains import Potentials
from autopar.problem.pass_quantities import COMPUTE, SHOWN
from autopar.problem.pass_tables import BACKWARD, PASSES, PassTables, Table
from autopar.problem.types import Net, Node, Problem

Key = tuple[str, int]  # a scope, and one of its passes
Span = tuple[float, float]
Spans = Mapping[tuple[Key, str], Span]
"""By pass and level of the cluster: the range of (seconds that the pass waits for collectives on the level's links) /
(seconds that it computes). Level "": for all collectives."""
ALL: Span = (0.0, math.inf)
NO_POTENTIALS: Mapping[int, Potentials] = {}


@dataclass(frozen=True, eq=False)
class Room:
    """One memory limit: bytes of each node [choices] and net [rows, columns], which are at most `limit` in all. Those
    of `Relaxed.again` count `times` times."""

    nodes: Sequence[np.ndarray]
    nets: Sequence[np.ndarray]
    limit: float
    times: float = 1.0


@dataclass(frozen=True, eq=False)
class Sums:
    """One solution: by pass its quantities of problem.pass_tables, followed by a 1 (for constant terms of prices); its
    seconds outside of passes; its bytes above the limit of each Room (negative: below). `carried`: the row and the
    column of each of `Relaxed.carried`, which `passes` do not count."""

    passes: Mapping[Key, np.ndarray]
    own_s: float
    over: np.ndarray
    carried: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Costs:
    """An additive Problem: seconds of each node [choices], of each net that counts [rows, columns], all >= 0, and a
    constant `more_s` (may be negative), of which `lost_s` is what chains of blocks lose at their ends."""

    node_s: list[np.ndarray]
    net_s: list[np.ndarray]
    more_s: float
    lost_s: float = 0.0


@dataclass(eq=False)
class Relaxed:
    """The step to bound: the passes of `passing`, each `times` times (0 where not given), and seconds outside of
    passes, by node and net.

        rooms     memory limits
        spans     only solutions are bounded whose waits are in these ranges
        again     by scope of blocks that run again, the (seconds, bytes) one of which is added to its backward
                  (joint.remat_bounds)
        fixed_s   a constant
        chained   whether nets from block to block count, of which each block may have another solution
                  (joint.block_chains): only where all blocks count alike, wherever they are
    """

    passing: PassTables
    times: Mapping[Key, float]
    node_s: Sequence[np.ndarray]
    net_s: Sequence[np.ndarray]
    rooms: Sequence[Room] = ()
    spans: Spans = field(default_factory=dict)
    again: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    fixed_s: float = 0.0
    chained: bool = False

    @property
    def problem(self) -> Problem:
        """The Problem whose solutions are bounded."""
        return self.passing.model.problem

    @cached_property
    def keys(self) -> list[Key]:
        """The passes that count, by scope: those that run at least once."""
        return [
            (scope, way) for scope in self.passing.scopes for way in PASSES if self.times.get((scope, way), 0.0) > 0.0
        ]

    @cached_property
    def carried(self) -> Mapping[int, int]:
        """The nets, by number, that are divided between neighbours, with how many blocks there are."""
        return self.passing.carried if self.chained else {}

    def pass_of(self, sums: Sums, key: Key) -> np.ndarray:
        """The quantities of a pass of `sums`, with the nets that are carried as if all blocks had this solution."""
        passes = {key: sums.passes[key].copy()}
        for t, at in sums.carried.items():
            _add(passes, self.passing.nets[t], at)
        return passes[key]

    @property
    def hides(self) -> bool:
        """Whether any collective can be overlapped."""
        return self.passing.model.prices.overlap > 0.0

    def sums(
        self, choice: Sequence[int], prices: Mapping[Key, np.ndarray] | None = None, bytes_s: np.ndarray | None = None
    ) -> Sums:
        """The sums of `choice`. Of each entry of `again`, the pair that is cheapest at these prices is added; without
        prices the first one."""
        passes = {key: np.eye(1, self.passing.width + 1, self.passing.width)[0] for key in self.keys}
        carried: dict[int, tuple[int, int]] = {}
        own_s, over = self.fixed_s, -np.array([room.limit for room in self.rooms], float)
        for v, c in enumerate(choice):
            own_s += float(self.node_s[v][c])
            over += [float(room.nodes[v][c]) for room in self.rooms]
            _add(passes, self.passing.nodes[v], np.s_[c])
        for t, net in enumerate(self.problem.nets):
            row = int(net.row[choice[net.producer]])
            if t in self.passing.carried:
                (use,) = net.uses
                if self.chained:
                    carried[t] = row, use.asks[choice[use.node]]
                continue
            for column in sorted({use.asks[choice[use.node]] for use in net.uses}):
                own_s += float(self.net_s[t][row, column])
                over += [float(room.nets[t][row, column]) for room in self.rooms]
                _add(passes, self.passing.nets[t], np.s_[row, column])
        for scope, pairs in self.again.items():
            seconds, nbytes = (
                pairs[0] if prices is None else min(pairs, key=lambda pair: self._again_s(scope, pair, prices, bytes_s))
            )
            passes[scope, BACKWARD][[SHOWN, COMPUTE]] += seconds
            over += [room.times * nbytes for room in self.rooms]
        return Sums(passes, own_s, over, carried)

    def _again_s(
        self, scope: str, pair: tuple[float, float], prices: Mapping[Key, np.ndarray], bytes_s: np.ndarray | None
    ) -> float:
        """The cost of a (seconds, bytes) `pair` of `again` at the given prices."""
        second = float(prices[scope, BACKWARD][SHOWN] + prices[scope, BACKWARD][COMPUTE])
        byte_s = (
            sum(float(m) * room.times for m, room in zip(bytes_s, self.rooms, strict=True))
            if bytes_s is not None
            else 0.0
        )
        return second * pair[0] + byte_s * pair[1]

    def costs(
        self,
        prices: Mapping[Key, np.ndarray],
        bytes_s: np.ndarray,
        potentials: Mapping[int, Potentials] = NO_POTENTIALS,
    ) -> Costs:
        """The additive Problem at `prices` of each pass [quantities, then a constant], and at `bytes_s` [rooms] seconds
        per byte. `potentials`: of the nets that are carried."""
        node_s, net_s, up_s, all_lost_s = [], [], 0.0, 0.0
        rooms = [(float(m), room) for m, room in zip(bytes_s, self.rooms, strict=True) if m > 0.0]
        for v, (table, own_s, barred) in enumerate(zip(self.passing.nodes, self.node_s, self._barred, strict=True)):
            cost_s = own_s + _priced(table, prices)
            for m, room in rooms:
                cost_s = cost_s + m * room.nodes[v]
            if barred is not None:
                cost_s = np.where(barred, np.inf, cost_s)
            # costs must be >= 0: every solution has one choice of this node, so that a shift is a constant
            least_s = min(0.0, float(cost_s.min()))
            up_s -= least_s
            node_s.append(cost_s - least_s)
        for t, barred in self._counting.items():
            cost_s = self.net_s[t] + _priced(self.passing.nets[t], prices)
            if t in self.carried:
                cost_s, least_s, lost_s = block_chains.costs(
                    self.between_two_s(t, cost_s), self.carried[t], potentials.get(t, Potentials())
                )
                up_s, all_lost_s = up_s - least_s, all_lost_s + lost_s
            for m, room in rooms:
                cost_s = cost_s + m * room.nets[t]
            cost_s = np.maximum(cost_s, 0.0)
            net_s.append(cost_s if barred is None else np.where(barred, np.inf, cost_s))
        over_s = sum(float(m) * room.limit for m, room in zip(bytes_s, self.rooms, strict=True))
        fixed_s = self.fixed_s + sum(float(values[-1]) for values in prices.values())
        fixed_s += sum(
            min(self._again_s(scope, pair, prices, bytes_s) for pair in pairs) for scope, pairs in self.again.items()
        )
        return Costs(node_s, net_s, fixed_s - up_s - over_s, all_lost_s)

    def between_two_s(self, net: int, cost_s: np.ndarray) -> np.ndarray:
        """What one reshard between two blocks takes, where all of a carried net take `cost_s` [rows, columns]."""
        able = np.isfinite(self.problem.nets[net].cost_s)
        return np.where(able, cost_s, np.inf) / (self.carried[net] - 1)

    def priced(self, costs: Costs) -> Problem:
        """The Problem that has these costs and no memory limit."""
        whole = self.problem
        nodes = [
            Node(node.name, node.labels, cost_s, np.zeros(len(cost_s)), np.zeros(len(cost_s)))
            for node, cost_s in zip(whole.nodes, costs.node_s, strict=True)
        ]
        nets = [
            Net(net.name, net.producer, net.row, net.uses, cost_s, np.zeros_like(cost_s))
            for net, cost_s in zip((whole.nets[t] for t in self._counting), costs.net_s, strict=True)
        ]
        return Problem(tuple(nodes), tuple(nets), 0, math.inf, whole.name)

    @cached_property
    def _barred(self) -> list[np.ndarray | None]:
        """For each node, the mask of its impossible choices; None where all are possible."""
        return [
            _some(np.isinf(node.cost_s) | np.isinf(own_s))
            for node, own_s in zip(self.problem.nodes, self.node_s, strict=True)
        ]

    @cached_property
    def _counting(self) -> dict[int, np.ndarray | None]:
        """The nets, by number, that may cost anything at some prices, each with the mask of its impossible pairs (None:
        all are possible). Nets between places are left out, but for those that are carried: what a block leaves need
        not be what it reads itself."""
        barred = {
            t: _some(np.isinf(net.cost_s)) if t not in self.carried else None
            for t, net in enumerate(self.problem.nets)
            if t not in (self.passing.between or ()) or t in self.carried
        }
        return {
            t: mask
            for t, mask in barred.items()
            if mask is not None
            or self.passing.nets[t].takes
            or self.net_s[t].any()
            or any(room.nets[t].any() for room in self.rooms)
        }


def _some(mask: np.ndarray) -> np.ndarray | None:
    """`mask`, or None where all of it is False."""
    return mask if mask.any() else None


def _priced(table: Table, prices: Mapping[Key, np.ndarray]) -> np.ndarray:
    """The costs of the choices of one node or net at `prices` of the passes that it belongs to."""
    priced = [table.each[way] @ prices[table.scope, way][:-1] for way in PASSES if (table.scope, way) in prices]
    return np.asarray(priced[0] + priced[1] if len(priced) == 2 else sum(priced, np.zeros(table.each.shape[1:-1])))


def _add(passes: Mapping[Key, np.ndarray], table: Table, at: object) -> None:
    """Add the quantities of one choice to those of its passes."""
    for way in PASSES:
        if (table.scope, way) in passes:
            passes[table.scope, way][:-1] += table.each[way][at]
