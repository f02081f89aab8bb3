"""One priced solution on one mesh. Made by the Planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cluster import Mesh
from autopar.problem.build import Model
from autopar.problem.remat import Levels
from autopar.problem.types import Cost, Solution


@dataclass(eq=False)
class Candidate:
    """One solution on one mesh, with its price. `name` is the recipe, or "search"."""

    name: str
    mesh: Mesh
    model: Model
    solution: Solution
    cost: Cost
    remat: Levels = field(default_factory=dict)
    # by scope of `remat`: of how many blocks, where that is not all of them
    again: Mapping[str, int] = field(default_factory=dict)
    # by scope of `again`: what the other blocks keep, where they are run again too
    rest: Levels = field(default_factory=dict)
    # of its fullest rank, by the memory walk (autopar.memory); None while that was not done
    peak_bytes: float | None = None
    # what a solution costs as it runs
    timed: Callable[[Model, tuple[int, ...]], Cost] = field(
        default=lambda model, choice: model.problem.evaluate(choice)
    )
    # whether its Problem got a lower memory limit than the device has, to leave room for temporaries
    short: bool = False

    @property
    def strategy(self) -> str:
        """The recipe, or the search that found it."""
        return self.name if self.name != "search" else self.solution.strategy

    @property
    def peak(self) -> float:
        """`peak_bytes`, which must be known."""
        assert self.peak_bytes is not None, "its memory was not walked"
        return self.peak_bytes

    @property
    def counted_bytes(self) -> float:
        """Bytes per device as its Problem counts them, which is without temporaries (what lives within an operator or
        between two of them)."""
        return self.model.problem.price(self.solution.choice).memory_bytes

    def refined(self, solution: Solution) -> Candidate:
        """The same Problem with another solution. Where the Problem was given less memory than the device has, its
        bound does not hold for all plans that fit, so the bound of this Candidate is kept."""
        proven = replace(solution, bound_s=self.solution.bound_s) if self.short else solution
        return replace(self, solution=proven, cost=self.timed(self.model, solution.choice))

    @property
    def plainly(self) -> Cost:
        """The cost of the same choices without rematerialisation and without a memory limit."""
        return self.timed(self.model.plainly.with_limit(math.inf), self.solution.choice)
