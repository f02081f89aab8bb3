"""What is proven of relaxed steps at some prices, and the solutions that keep more from being proven: messages that are kept from prices to prices, and the exact search where these leave a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.joint.relaxed import Key, Relaxed
from autopar.problem.presolve import Choice
from autopar.search import ilp
from autopar.search.recosted import Recosted

CLOSE = 1e-3
"""Relative: what is proven to be this near to the least is as good as that."""

SOLVE_S = 3.0
"""Seconds for a Problem whose messages leave a gap: those that take longer have many choices of nearly the same price, and a bound near that."""


@dataclass(frozen=True)
class Seen:
    """`bound_s` holds for all solutions at the prices that were asked for; `choice` is one that is not as far above them, None where nobody needs one."""

    bound_s: float
    choice: Choice | None


class Solver:
    """Of `levels`, whose spans do not matter. `exact`: where messages leave a gap, the search closes it."""

    def __init__(self, levels: Sequence[Relaxed], *, exact: bool) -> None:
        self.levels, self.exact = levels, exact
        self._recosted: dict[int, Recosted] = {}

    def __call__(self, number: int, prices: Mapping[Key, np.ndarray], bytes_s: np.ndarray, known_s: float, cutoff_s: float) -> Seen:
        """Of level `number`: a bound, up to `cutoff_s` or nearly `known_s`, the least of all solutions that are known. Raises InfeasibleError where there are none."""
        relaxed = self.levels[number]
        costs = relaxed.costs(prices, bytes_s)
        if number not in self._recosted:
            self._recosted[number] = Recosted(relaxed.priced(costs))
        recosted, known = self._recosted[number], math.isfinite(known_s)
        target_s = min(cutoff_s, known_s - CLOSE * abs(known_s) if known else math.inf) - costs.more_s
        bound_s = recosted.bound_s(costs.node_s, costs.net_s, target_s)
        if bound_s >= target_s and known:
            return Seen(bound_s + costs.more_s, None)
        choice = recosted.solution()
        if choice is not None and (not self.exact or bound_s >= min(target_s, recosted.seconds(choice) * (1 - CLOSE))):
            return Seen(bound_s + costs.more_s, choice)
        found = ilp.search(relaxed.priced(costs), time_limit_s=SOLVE_S, start=choice, cutoff_s=cutoff_s - costs.more_s, gap=CLOSE / 2)
        return Seen(max(found.bound_s, bound_s) + costs.more_s, found.choice)
