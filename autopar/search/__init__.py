"""Problem -> Solution. One file per strategy, one line per strategy below; a search never sees torch or the graph.

Every strategy takes a time limit in seconds, a seed and a known feasible solution that it must not fall behind, and raises
InfeasibleError (with the shortfall) when nothing fits. `Problem.evaluate` prices what it returns.
"""

from __future__ import annotations

from typing import Protocol

from autopar.problem.types import Problem, Solution
from autopar.search import exhaustive, greedy, ilp, mcmc


class Search(Protocol):
    """The interface of a strategy."""

    def __call__(self, problem: Problem, *, time_limit_s: float, seed: int = 0,
                 start: tuple[int, ...] | None = None) -> Solution:
        """A feasible solution, never worse than `start`."""
        ...


SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive.search,
    "greedy": greedy.search,
    "ilp": ilp.search,
    "mcmc": mcmc.search,
}
