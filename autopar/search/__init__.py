"""Problem -> Solution. One file per strategy, one line per strategy below (and its name in the command line's help); a
search never sees torch or the graph.

Every strategy takes a time limit in seconds, a seed and a known feasible solution that it must not fall behind, and
raises InfeasibleError (with the shortfall) when nothing fits. `Problem.evaluate` prices what it returns. What a
strategy that is not in the table answers (`compile(..., search=function)`) is `checked`.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from numbers import Integral, Real
from typing import Protocol

from autopar.errors import InfeasibleError, PlanError
from autopar.problem.types import Problem, Solution
from autopar.search import exhaustive, greedy, ilp, mcmc


class Search(Protocol):
    """The interface of a strategy."""

    def __call__(
        self, problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None
    ) -> Solution:
        """A feasible solution, never worse than `start`."""
        ...


SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive.search,
    "greedy": greedy.search,
    "ilp": ilp.search,
    "mcmc": mcmc.search,
}


def checked(search: Search) -> Search:
    """`search`, whose answers are looked at: PlanError where one is no Solution, has no choice for each node, is
    infeasible, or has a bound above what it takes itself."""

    def asked(
        problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None
    ) -> Solution:
        found = search(problem, time_limit_s=time_limit_s, seed=seed, start=start)
        if wrong := _wrong(problem, found):
            got, wanted = wrong
            raise PlanError(
                f"the search gave {got} for {problem.name}; wanted {wanted} (autopar.search.Search says what a search "
                "takes and gives)"
            )
        return replace(found, choice=tuple(int(c) for c in found.choice))

    return asked


def _wrong(problem: Problem, found: object) -> tuple[str, str] | None:
    """Got and wanted, where something is wrong with an answer."""
    if not isinstance(found, Solution):
        return f"{found!r}", "a Solution"
    if not isinstance(found.choice, Sized) or len(found.choice) != len(problem.nodes):
        return f"the choice {found.choice!r}", f"one entry for each of {len(problem.nodes)} nodes"
    for node, choice in zip(problem.nodes, found.choice, strict=True):
        if not isinstance(choice, Integral) or not 0 <= choice < len(node.labels):
            return f"choice {choice!r} of node {node.name}", f"a whole number from 0 to {len(node.labels) - 1}"
    try:
        time_s = problem.evaluate(tuple(found.choice)).time_s
    except InfeasibleError as error:
        return f"what is not feasible ({error})", "a choice that is, or an InfeasibleError where there is none"
    if not isinstance(found.bound_s, Real) or not float(found.bound_s) <= time_s * (1 + 1e-6):
        return (
            f"a bound of {found.bound_s!r} s and a choice that takes {time_s:.6g} s",
            "a bound that is proven for every choice, 0 where none is",
        )
    return None
