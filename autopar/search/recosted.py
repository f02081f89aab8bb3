"""One Problem at ever other costs that just add up: what its messages were at the last costs is near what they are at
these.

    bound       sweeps until the bound is as high as anybody asks for, or does not rise any more
    solution    where it stays below, by descent from what the messages say
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.problem.presolve import Choice, Selected
from autopar.problem.types import Problem
from autopar.search.descent import descend
from autopar.search.messages import FORBIDDEN, Messages, split
from autopar.search.state import State, scale_s

SWEEPS = 12
"""There and back so many times at most."""

STALL = 1e-4
"""Relative: a bound that rises by less is as good as it gets."""


class Recosted:
    """`problem` has no memory limit, no overlap groups and no lanes; what is infinite stays so at all costs. Raises
    InfeasibleError where a node has no choice."""

    def __init__(self, problem: Problem) -> None:
        self._selected = Selected.of(problem)
        small = self.problem = self._selected.problem  # without what is forbidden, at the last costs
        self._factors = [split(net) for net in small.nets]
        self._messages = Messages(
            [factor for parts in self._factors for factor in parts],
            [node.cost_s for node in small.nodes],
            [np.ones(len(node.cost_s), bool) for node in small.nodes],
            1.0,
        )
        self._state: State | None = None

    def bound_s(self, node_s: Sequence[np.ndarray], net_s: Sequence[np.ndarray], target_s: float) -> float:
        """Seconds that no solution beats at costs `node_s` [choices] and `net_s` [rows, columns]; no more than
        `target_s` is asked for."""
        self._price(node_s, net_s)
        found_s = -math.inf
        for _ in range(SWEEPS):
            self._messages.sweep(forwards=True)
            self._messages.sweep(forwards=False)
            before_s, found_s = found_s, max(found_s, self._messages.value)
            if found_s >= target_s or found_s < before_s + STALL * abs(found_s):
                break
        return found_s

    def seconds(self, choice: Choice) -> float:
        """What a choice of the whole problem takes at the last costs."""
        return self.problem.price(self._selected.small(choice)).time_s

    def _price(self, node_s: Sequence[np.ndarray], net_s: Sequence[np.ndarray]) -> None:
        own, tables = self._selected.costs(node_s, net_s)
        nodes = tuple(replace(node, cost_s=each) for node, each in zip(self.problem.nodes, own, strict=True))
        nets = tuple(replace(net, cost_s=each) for net, each in zip(self.problem.nets, tables, strict=True))
        self.problem = replace(self.problem, nodes=nodes, nets=nets, _check=False)
        self._messages.big_s, self._messages.own = FORBIDDEN * scale_s(self.problem), own
        for table, parts in zip(tables, self._factors, strict=True):
            finite_s = np.where(np.isfinite(table), table, self._messages.big_s)
            for factor in parts:
                factor.table = factor.share * finite_s

    def solution(self) -> Choice | None:
        """A choice of the whole problem that no single move makes better at the last costs; None where what the
        messages say ends at one that is forbidden."""
        start = self._messages.decode()
        if self._state is None:
            self._state = State(self.problem, start)
        else:
            self._state.reprice(self.problem)
        found = descend(self.problem, start, math.inf, self._state)
        return None if found is None else self._selected.restore(found)
