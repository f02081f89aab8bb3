"""Lower bounds of relaxed steps at given prices: by message passing, whose messages are kept from prices to prices, and
by the exact search where these leave a gap. Called by cutting_planes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.block_chains import Potentials
from autopar.joint.relaxed import Key, Relaxed
from autopar.problem.types import Picks
from autopar.search import ilp
from autopar.search.recosted import Recosted

BOUND_TOLERANCE = 1e-3
"""Relative distance from the optimum at which a bound is close enough."""

RELAXED_SOLVE_S = 3.0
"""Seconds at most of the exact search. Problems that take longer have many choices of nearly the same cost, and a bound
close to it."""


@dataclass(frozen=True)
class Seen:
    """`bound_s`: a lower bound of all solutions at the given prices. `choice`: a solution close to it; None where the
    bound already reaches what is known, or none was found in time. `lost_s`: of Costs."""

    bound_s: float
    choice: Picks | None
    lost_s: float = 0.0


class Solver:
    """Solves relaxed steps of `levels`, whose spans do not matter. `exact`: close gaps of message passing by search."""

    def __init__(self, levels: Sequence[Relaxed], *, exact: bool) -> None:
        self.levels, self.exact = levels, exact
        self._recosted: dict[int, Recosted] = {}

    def __call__(
        self,
        number: int,
        prices: Mapping[Key, np.ndarray],
        bytes_s: np.ndarray,
        potentials: Mapping[int, Potentials],
        known_s: float,
        cutoff_s: float,
    ) -> Seen:
        """A bound for level `number` at `prices`, `bytes_s` and `potentials` (Relaxed.costs). Ends once it reaches
        `cutoff_s`, or nearly `known_s`, the cost of the best known solution. Raises InfeasibleError where some node
        has no choice."""
        relaxed = self.levels[number]
        costs = relaxed.costs(prices, bytes_s, potentials)
        if number not in self._recosted:
            self._recosted[number] = Recosted(relaxed.priced(costs))
        recosted, known = self._recosted[number], math.isfinite(known_s)
        target_s = min(cutoff_s, known_s - BOUND_TOLERANCE * abs(known_s) if known else math.inf) - costs.more_s
        bound_s = recosted.bound_s(costs.node_s, costs.net_s, target_s)
        if bound_s >= target_s and known:
            return Seen(bound_s + costs.more_s, None, costs.lost_s)
        choice = recosted.solution()
        if choice is not None and (
            not self.exact or bound_s >= min(target_s, recosted.seconds(choice) * (1 - BOUND_TOLERANCE))
        ):
            return Seen(bound_s + costs.more_s, choice, costs.lost_s)
        try:
            found = ilp.search(
                relaxed.priced(costs),
                time_limit_s=RELAXED_SOLVE_S,
                start=choice,
                cutoff_s=cutoff_s - costs.more_s,
                gap=BOUND_TOLERANCE / 2,
            )
        except InfeasibleError:  # of a search whose time was up: that nothing was found proves nothing
            return Seen(bound_s + costs.more_s, None, costs.lost_s)
        return Seen(max(found.bound_s, bound_s) + costs.more_s, found.choice, costs.lost_s)
