"""The search strategies: from a Problem (numbers only) to a Solution. Called by the planner through the table SEARCHES;
a search never sees torch or the graph.

    exhaustive, greedy, ilp,
    mcmc                        the strategies: one file each, one row of SEARCHES, one word of the command line's help
    descent, state              local search: one solution, and the cost of every move of a node
    feasible                    solutions of little memory, and the proof that none fits
    exact                       the core of `ilp`: dual, then LP and integer program (model, solver)
    dual, messages, factors     lower bounds by message passing; recosted: again and again at other costs
    honing, tangents            local search by the price of a step as it runs

A strategy takes a time limit in seconds, a seed, and a feasible solution that its result must not be worse than. It
raises InfeasibleError (with the shortfall) when nothing fits. `Problem.evaluate` prices its result. The results of a
strategy that is not of this package (`compile(..., search=function)`, or one that was added to SEARCHES) are
validated by `checked`.
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
"""The strategies by name. Code of a user may add its own, for `--search`; their results are validated, too."""

OWN = tuple(SEARCHES.values())
"""Those of this package, whose results need no validation."""


def checked(search: Search) -> Search:
    """`search` with its results validated. The wrapped search raises PlanError where a result is no Solution, does not
    have one choice for each node, is infeasible, or claims a bound above its own time."""

    def validated(
        problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None
    ) -> Solution:
        found = search(problem, time_limit_s=time_limit_s, seed=seed, start=start)
        if defect := _defect(problem, found):
            got, wanted = defect
            raise PlanError(
                f"the search gave {got} for {problem.name}; wanted {wanted} (autopar.search.Search says what a search "
                "takes and gives)"
            )
        return replace(found, choice=tuple(int(c) for c in found.choice))

    return validated


def _defect(problem: Problem, found: object) -> tuple[str, str] | None:
    """What is wrong with a result of a search, as the texts (got, wanted) of an error; None where nothing is."""
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
