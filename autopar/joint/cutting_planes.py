"""The largest bound that prices can prove, by cutting planes.

    master    the prices (of the polytopes of joint.price_polytope, and of bytes) at which the least of all solutions so far is largest: no bound is above that
    solve     the Problem at these prices (joint.relaxed_solving): a proven bound, and one more solution where that is below

Where blocks may be run again to several levels, a plan is a mixture of them, and its time and bytes those of the mixture: what is proven of each level at the
same price of bytes holds for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.effort import ROUNDS
from autopar.joint.price_polytope import Polytope, first_prices
from autopar.joint.relaxed import Key, Relaxed, Sums
from autopar.joint.relaxed_solving import CLOSE, Seen
from autopar.problem.pass_tables import SHOWN
from autopar.search.model import Linear
from autopar.search.solver import GLOP, solve

TINY = 1e-9  # of a step: such coefficients only trouble the solver, and any prices prove something

Prices = dict[Key, np.ndarray]
Solve = Callable[[int, Prices, np.ndarray, float, float], Seen]
"""As joint.relaxed_solving.Solver is called."""


@dataclass(eq=False)
class Level:
    """One of the levels with the solutions that were met."""

    relaxed: Relaxed
    met: list[Sums] = field(default_factory=list)


@dataclass(eq=False)
class Cutting:
    """`levels` with as many Rooms each; The solutions of `solve`
    are added to `choices`."""

    levels: Sequence[Level]
    solve: Solve
    choices: list[tuple[int, ...]] = field(default_factory=list)
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of the solutions that were met before the last prices: their mixture is what keeps these from proving more

    def bound_s(self, cutoff_s: float, rounds: int = ROUNDS) -> float:
        """Seconds that no mixture of solutions beats, as near to the most that can be proven as `rounds` allow; no more than `cutoff_s` is asked for."""
        best_s = self._first_s(cutoff_s)
        if best_s >= cutoff_s:
            return best_s
        for _ in range(rounds):
            each, bytes_s, most_s = self._master()
            met, best_s = len(self.choices), max(best_s, self._proven_s(each, bytes_s, most_s, cutoff_s))
            if len(self.choices) == met or best_s >= cutoff_s or best_s >= most_s * (1 - CLOSE):
                break
        return best_s

    def _proven_s(self, each: Sequence[Prices], bytes_s: np.ndarray, known_s: float, cutoff_s: float) -> float:
        """What is proven at prices of each level and of bytes, where no solution that was met takes less than `known_s`."""
        proven_s = math.inf
        for number, (level, prices) in enumerate(zip(self.levels, each, strict=True)):
            try:
                seen = self.solve(number, prices, bytes_s, known_s, cutoff_s)
            except InfeasibleError:
                continue  # nothing is possible at this level
            proven_s = min(proven_s, seen.bound_s)
            if seen.choice is not None:
                level.met.append(level.relaxed.sums(seen.choice, prices, bytes_s))
                self.choices.append(seen.choice)
        return proven_s

    def most_s(self) -> float:
        """What prices can prove at most of the solutions that were met."""
        return self._master()[2]

    def _first_s(self, cutoff_s: float) -> float:
        """What plain prices prove where nothing was met, so that there are solutions by which prices are bounded; nothing where all levels have some."""
        proven_s = math.inf
        for number, level in enumerate(self.levels):
            if level.met:
                proven_s = 0.0
                continue
            prices, none = first_prices(level.relaxed), np.zeros(len(level.relaxed.rooms))
            seen = self.solve(number, prices, none, math.inf, cutoff_s)
            assert seen.choice is not None, "nothing was known"
            proven_s = min(proven_s, seen.bound_s)
            level.met.append(level.relaxed.sums(seen.choice, prices, none))
            self.choices.append(seen.choice)
        return proven_s

    def _master(self) -> tuple[list[Prices], np.ndarray, float]:
        """Prices of each level, of bytes in each Room, and the least at these prices of all solutions that were met."""
        unit_s = min(_shown_s(level.relaxed, level.met[0]) for level in self.levels) or 1.0  # passes that take nothing: backwards of inference
        model = Linear(1.0, 1.0)
        model.starts = np.zeros(1, int)
        least = model.add_columns(np.array([-1.0]), np.zeros(1), 1e3)
        rooms = self.levels[0].relaxed.rooms
        price = model.add_columns(np.zeros(len(rooms)), np.zeros(len(rooms)), 1e3)  # of filling a Room, in units of a step
        found, rows = [], []
        for level in self.levels:
            relaxed = level.relaxed
            parts: dict[Key, Polytope] = {}
            for key in relaxed.keys:  # what is outside of blocks is the first
                parts[key] = Polytope(model, relaxed, key, parts.get(("", key[1])))
            found.append(parts)
            for sums in level.met:
                row = model.add_rows(1, -math.inf, _shown_s(relaxed, sums) / unit_s)
                rows.append(row)
                model.add_entries(np.array([row]), least, 1.0)
                over = np.array([float(each) / room.limit for each, room in zip(sums.over, rooms, strict=True)])
                model.add_entries(np.full(len(over), row), price, -over)
                for key, part in parts.items():
                    values = -relaxed.times[key] * (sums.passes[key] @ part.taken) / unit_s
                    used = np.flatnonzero(np.abs(values) > TINY)
                    model.add_entries(np.full(len(used), row), part.columns[used], values[used])
        answer = solve(model, GLOP, integer=False, time_limit_s=5.0)
        assert answer.values is not None and answer.dual is not None, "prices of nothing are always possible"
        values, self.weights = answer.values, np.maximum(0.0, -answer.dual[rows])
        each = [{key: level.relaxed.times[key] * (part.taken @ np.maximum(values[part.columns], 0.0) + _unit(SHOWN, len(part.taken)))
                 for key, part in parts.items()} for level, parts in zip(self.levels, found, strict=True)]
        bytes_s = np.array([max(0.0, values[column]) * unit_s / room.limit for column, room in zip(price, rooms, strict=True)])
        return each, bytes_s, -answer.objective * unit_s


def _shown_s(relaxed: Relaxed, sums: Sums) -> float:
    """Seconds of a solution with all that is in the background for nothing."""
    return sums.own_s + sum(relaxed.times[key] * float(sums.passes[key][SHOWN]) for key in relaxed.keys)


def _unit(index: int, size: int) -> np.ndarray:
    return np.eye(1, size, index)[0]
