"""Lower bounds of one Problem whose costs change again and again, as in a cutting-plane or subgradient method. Each
bound starts from the messages of the one before, since similar costs have similar messages. Called by autopar.joint.

    bound_s     sweeps of messages until the bound reaches a target, or rises no more
    solution    a solution at the last costs, by descent from the solution that the messages suggest
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.problem.presolve import Selected
from autopar.problem.types import Picks, Problem
from autopar.search.descent import descend
from autopar.search.messages import FORBIDDEN, Messages, split
from autopar.search.state import State, scale_s

SWEEPS = 12
"""Pairs of a forward and a backward sweep, at most."""

STALL = 1e-4
"""Relative: sweeps end when the bound rises by less."""


class Recosted:
    """`problem` must have no memory limit, overlap groups or lanes; its infinite entries are infinite at all costs.
    Raises InfeasibleError where a node has no choice."""

    def __init__(self, problem: Problem) -> None:
        self._selected = Selected.of(problem)
        small = self.problem = self._selected.problem  # without forbidden choices; gets the costs of each call
        self._factors = [split(net) for net in small.nets]
        self._messages = Messages(
            [factor for parts in self._factors for factor in parts],
            [node.cost_s for node in small.nodes],
            [np.ones(len(node.cost_s), bool) for node in small.nodes],
            1.0,
        )
        self._state: State | None = None

    def bound_s(self, node_s: Sequence[np.ndarray], net_s: Sequence[np.ndarray], target_s: float) -> float:
        """A lower bound in seconds of all solutions at costs `node_s` [nodes][choices] and `net_s` [nets][rows,
        columns]. Ends early once it is at least `target_s`."""
        self._price(node_s, net_s)
        found_s = -math.inf
        for _ in range(SWEEPS):
            self._messages.sweep(forwards=True)
            self._messages.sweep(forwards=False)
            before_s, found_s = found_s, max(found_s, self._messages.value)
            if found_s >= target_s or found_s < before_s + STALL * abs(found_s):
                break
        return found_s

    def seconds(self, choice: Picks) -> float:
        """Seconds of a choice of the whole problem at the last costs."""
        return self.problem.price(self._selected.small(choice)).time_s

    def _price(self, node_s: Sequence[np.ndarray], net_s: Sequence[np.ndarray]) -> None:
        """Set the costs of the problem and of all factors."""
        own, tables = self._selected.costs(node_s, net_s)
        nodes = tuple(replace(node, cost_s=each) for node, each in zip(self.problem.nodes, own, strict=True))
        nets = tuple(replace(net, cost_s=each) for net, each in zip(self.problem.nets, tables, strict=True))
        self.problem = replace(self.problem, nodes=nodes, nets=nets, _check=False)
        self._messages.big_s, self._messages.own = FORBIDDEN * scale_s(self.problem), own
        for table, parts in zip(tables, self._factors, strict=True):
            finite_s = np.where(np.isfinite(table), table, self._messages.big_s)
            for factor in parts:
                factor.table = factor.share * finite_s

    def solution(self) -> Picks | None:
        """A choice of the whole problem that no move of a single node improves at the last costs; None where descent
        ends at one that is forbidden."""
        start = self._messages.decode()
        if self._state is None:
            self._state = State(self.problem, start)
        else:
            self._state.reprice(self.problem)
        found = descend(self.problem, start, math.inf, self._state)
        return None if found is None else self._selected.restore(found)
