"""The best prices for a relaxed step (the Lagrangian dual), by cutting planes.

    master    a linear program: the valid prices (joint.price_polytope) and prices of bytes at which the cheapest of all
              solutions met so far costs most. No prices prove more than that
    solve     the Problem at these prices (joint.relaxed_solving): a proven bound, and a new solution where that is
              cheaper than all met

Potentials of what is carried from block to block (joint.block_chains) are columns of the master, too: for the rows and
columns of the solutions met.

Where blocks may run again at several levels, a plan is a mixture of levels, and so are its time and bytes: the lowest
bound of all levels, at the same price of bytes, holds for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.block_chains import Potentials
from autopar.joint.effort import MOST_ROUNDS
from autopar.joint.price_polytope import Polytope, first_prices
from autopar.joint.relaxed import NO_POTENTIALS, Key, Relaxed, Sums
from autopar.joint.relaxed_solving import BOUND_TOLERANCE, Seen
from autopar.problem.pass_quantities import SHOWN
from autopar.problem.pass_tables import PASSES
from autopar.search.model import Linear
from autopar.search.solver import GLOP, solve

# relative to a step: smaller coefficients are dropped. They trouble the solver, and any valid prices give a bound
TINY = 1e-9

DualPrices = dict[Key, np.ndarray]
Solve = Callable[[int, DualPrices, np.ndarray, Mapping[int, Potentials], float, float], Seen]
"""As joint.relaxed_solving.Solver is called."""


@dataclass(eq=False)
class Level:
    """A level of rematerialisation, and the solutions of it that were met."""

    relaxed: Relaxed
    met: list[Sums] = field(default_factory=list)


@dataclass(eq=False)
class Cutting:
    """The dual of `levels`, which have the same number of memory limits. Solutions that `solve` finds are added to
    `choices`. `lost_s`: what chains of blocks lose at their ends in the highest bound (joint.block_chains)."""

    levels: Sequence[Level]
    solve: Solve
    choices: list[tuple[int, ...]] = field(default_factory=list)
    # dual values of the solutions in the last master: their mixture keeps the bound from being higher
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lost_s: float = 0.0

    def bound_s(self, cutoff_s: float, rounds: int = MOST_ROUNDS) -> float:
        """A lower bound of the seconds of all mixtures of solutions, as good as `rounds` of the master make it. Ends
        once it reaches `cutoff_s`."""
        best_s, known = self._first_s(cutoff_s)
        if best_s >= cutoff_s or not known:
            return best_s
        for _ in range(rounds):
            each, bytes_s, potentials, most_s = self._master()
            met, (found_s, lost_s) = len(self.choices), self._proven(each, bytes_s, potentials, most_s, cutoff_s)
            if found_s > best_s:
                best_s, self.lost_s = found_s, lost_s
            if len(self.choices) == met or best_s >= cutoff_s or best_s >= most_s * (1 - BOUND_TOLERANCE):
                break
        return best_s

    def _proven(
        self,
        each: Sequence[DualPrices],
        bytes_s: np.ndarray,
        potentials: Mapping[int, Potentials],
        known_s: float,
        cutoff_s: float,
    ) -> tuple[float, float]:
        """The bound at given prices, and what the chains of the only level lose. No solution met so far costs less than
        `known_s` at them."""
        proven_s, lost_s = math.inf, 0.0
        for (number, level), prices in zip(self._possible, each, strict=True):
            seen = self.solve(number, prices, bytes_s, potentials, known_s, cutoff_s)
            proven_s, lost_s = min(proven_s, seen.bound_s), seen.lost_s
            if seen.choice is not None:
                level.met.append(level.relaxed.sums(seen.choice, prices, bytes_s))
                self.choices.append(seen.choice)
        return proven_s, lost_s

    def most_s(self) -> float:
        """The most that any prices prove against the solutions met so far."""
        return self._master()[-1]

    @property
    def _possible(self) -> list[tuple[int, Level]]:
        """The levels of which a solution is known, with their numbers."""
        return [(number, level) for number, level in enumerate(self.levels) if level.met]

    def _first_s(self, cutoff_s: float) -> tuple[float, bool]:
        """Solve levels without a solution at their first prices, because a master needs one of each. The bound that
        this proves, 0 where some level had one; and whether a solution of each level is known at which any is
        possible."""
        proven_s, known = math.inf, True
        for number, level in enumerate(self.levels):
            if level.met:
                proven_s = 0.0
                continue
            prices, none = first_prices(level.relaxed), np.zeros(len(level.relaxed.rooms))
            try:
                seen = self.solve(number, prices, none, NO_POTENTIALS, math.inf, cutoff_s)
            except InfeasibleError:
                continue  # a mixture has nothing of this level
            proven_s, known = min(proven_s, seen.bound_s), known and seen.choice is not None
            if seen.choice is not None:
                level.met.append(level.relaxed.sums(seen.choice, prices, none))
                self.choices.append(seen.choice)
        return proven_s, known

    def _master(self) -> tuple[list[DualPrices], np.ndarray, Mapping[int, Potentials], float]:
        """The prices of each level, the seconds per byte of each memory limit, the potentials of what the only level
        carries, and the cost at these of the cheapest solution met."""
        # some passes take nothing: backwards of inference
        levels = [level for _, level in self._possible]
        unit_s = min(_shown_s(level.relaxed, level.met[0]) for level in levels) or 1.0
        model = Linear(1.0, 1.0)
        model.starts = np.zeros(1, int)
        least = model.add_columns(np.array([-1.0]), np.zeros(1), 1e3)
        rooms = levels[0].relaxed.rooms
        # of filling a memory limit, in units of a step
        price = model.add_columns(np.zeros(len(rooms)), np.zeros(len(rooms)), 1e3)
        found, rows, chains = [], [], list[BlockChain]()
        for level in levels:
            relaxed = level.relaxed
            parts: dict[Key, Polytope] = {}
            for key in relaxed.keys:  # "" is the first one, which others refer to
                parts[key] = Polytope(model, relaxed, key, parts.get(("", key[1])))
            found.append(parts)
            chains = [BlockChain(model, relaxed, t, parts, level.met, unit_s) for t in relaxed.carried]
            for sums in level.met:
                row = model.add_rows(1, -math.inf, _shown_s(relaxed, sums) / unit_s)
                for chain in chains:
                    chain.count(row, *sums.carried[chain.net])
                rows.append(row)
                model.add_entries(np.array([row]), least, 1.0)
                over = np.array([float(each) / room.limit for each, room in zip(sums.over, rooms, strict=True)])
                model.add_entries(np.full(len(over), row), price, -over)
                for key, part in parts.items():
                    _add(model, row, part, -relaxed.times[key] * sums.passes[key] / unit_s)
        # it takes milliseconds; a limit would be reached by machines that stand still for a while
        answer = solve(model, GLOP, integer=False, time_limit_s=math.inf)
        assert answer.values is not None and answer.dual is not None, "prices of nothing are always possible"
        values, self.weights = answer.values, np.maximum(0.0, -answer.dual[rows])
        each = [
            {
                key: level.relaxed.times[key]
                * (part.taken @ np.maximum(values[part.columns], 0.0) + _unit(SHOWN, len(part.taken)))
                for key, part in parts.items()
            }
            for level, parts in zip(levels, found, strict=True)
        ]
        bytes_s = np.array(
            [max(0.0, values[column]) * unit_s / room.limit for column, room in zip(price, rooms, strict=True)]
        )
        return each, bytes_s, {chain.net: chain.found(values, unit_s) for chain in chains}, -answer.objective * unit_s


class BlockChain:
    """The potentials of a carried `net` in the master, in units of `unit_s`: columns for the rows and columns of the
    solutions `met`, and one for what the chain loses at its ends."""

    def __init__(
        self,
        model: Linear,
        relaxed: Relaxed,
        net: int,
        parts: Mapping[Key, Polytope],
        met: Sequence[Sums],
        unit_s: float,
    ) -> None:
        self.model, self.net, self.blocks = model, net, relaxed.carried[net]
        rows, columns = (dict.fromkeys(each) for each in zip(*(sums.carried[net] for sums in met), strict=True))
        self.leaving, self.entering = (
            dict(zip(rows, self._free(rows), strict=True)),
            dict(zip(columns, self._free(columns), strict=True)),
        )
        self.lost = model.add_columns(np.zeros(1), np.zeros(1), 1e3)
        table = relaxed.passing.nets[net]
        keys = [(table.scope, way) for way in PASSES if (table.scope, way) in parts]
        able = relaxed.between_two_s(net, np.zeros(relaxed.problem.nets[net].cost_s.shape))
        for row, column in itertools.product(rows, columns):
            lost = model.add_rows(1, -math.inf, 0.0)
            self._add(lost, row, column, 1.0)
            model.add_entries(np.array([lost]), self.lost, -1.0)
            if math.isinf(able[row, column]):
                continue
            took = {
                key: np.append(relaxed.times[key] * table.each[key[1]][row, column], 0.0) / (self.blocks - 1) / unit_s
                for key in keys
            }
            least = model.add_rows(1, -math.inf, sum(float(each[SHOWN]) for each in took.values()))
            self._add(least, row, column, 1.0)
            for key, each in took.items():
                _add(model, least, parts[key], -each)

    def _free(self, many: Sized) -> list[tuple[int, int]]:
        """Columns without limits, each as the difference of two."""
        made = self.model.add_columns(np.zeros(2 * len(many)), np.zeros(2 * len(many)), 1e3)
        return [(int(more), int(less)) for more, less in made.reshape(-1, 2)]

    def _add(self, at: int, row: int, column: int, times: float) -> None:
        """Add the potentials of a row and a column to the model's row `at`."""
        for more, less in (self.leaving[row], self.entering[column]):
            self.model.add_entries(np.array([at, at]), np.array([more, less]), np.array([times, -times]))

    def count(self, at: int, row: int, column: int) -> None:
        """Add what all blocks with this row and column take, less what is lost, to the cost of a solution in the
        model's row `at`."""
        self._add(at, row, column, -float(self.blocks))
        self.model.add_entries(np.array([at]), self.lost, 1.0)

    def found(self, values: np.ndarray, unit_s: float) -> Potentials:
        """The potentials in a solution of the master, in seconds."""
        leaving, entering = (
            {at: float(values[more] - values[less]) * unit_s for at, (more, less) in each.items()}
            for each in (self.leaving, self.entering)
        )
        return Potentials(leaving, entering)


def _add(model: Linear, row: int, part: Polytope, quantities: np.ndarray) -> None:
    """Add what the `quantities` of a pass, followed by a 1, take at the prices of `part` to a row of the model."""
    values = quantities @ part.taken
    used = np.flatnonzero(np.abs(values) > TINY)
    model.add_entries(np.full(len(used), row), part.columns[used], values[used])


def _shown_s(relaxed: Relaxed, sums: Sums) -> float:
    """Seconds of a solution without its background collectives, and without what is carried."""
    return sums.own_s + sum(relaxed.times[key] * float(sums.passes[key][SHOWN]) for key in relaxed.keys)


def _unit(index: int, size: int) -> np.ndarray:
    """The unit vector of length `size` with a 1 at `index`."""
    return np.eye(1, size, index)[0]
