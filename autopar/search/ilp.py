"""The strategy by linear and integer programming with OR-tools; the formulation is in search/model.py.

    presolve -> incumbent (greedy, start) -> LP -> where it is fractional: the integer program with the LP's bound

The LP's optimum is a lower bound for every solution, and so is what the integer solver proves until its time is up: the
solution carries the larger of the two.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.problem.presolve import presolve
from autopar.problem.types import Problem, Solution
from autopar.search import greedy
from autopar.search.feasible import better, fits, least_memory
from autopar.search.model import Linear, build
from autopar.search.solver import GLOP, SCIP, is_integral, read_choice, solve

_GAP = 1e-7  # relative: closer than this is called optimal


def search(problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None) -> Solution:
    """The optimum, or with time short the best solution found, never worse than `start`; `bound_s` is proven either way.

    Deterministic for a seed unless time runs out. Raises InfeasibleError with the shortfall when nothing fits.
    """
    deadline = time.perf_counter() + time_limit_s
    small, restore = presolve(problem)
    first = greedy.descend(small, None, deadline)
    if first is None:
        first = least_memory(small, time_limit_s=time_limit_s)
        first = better(small, first, greedy.descend(small, first, deadline))
    assert first is not None, "least_memory gives a feasible solution"
    found, bound_s, note = _solve(small, first, deadline, seed)
    best = restore(found)
    if start is not None and fits(problem, start) and problem.price(start).time_s < problem.price(best).time_s:
        best = start
    return finish(problem, best, bound_s, note)


def finish(problem: Problem, choice: tuple[int, ...], bound_s: float, note: str) -> Solution:
    """The solution with its bound (never above its own time: rounding of the solver) and gap."""
    time_s = problem.evaluate(choice).time_s
    bound_s = min(max(bound_s, 0.0), time_s)
    gap = (time_s - bound_s) / time_s if time_s > 0 else 0.0
    if gap <= _GAP:
        return Solution(choice, "ilp", bound_s, True, f"{note}; optimal")
    return Solution(choice, "ilp", bound_s, False, f"{note}; gap {gap:.2%}")


def _solve(problem: Problem, first: tuple[int, ...], deadline: float, seed: int) -> tuple[tuple[int, ...], float, str]:
    """(best choice, bound in seconds, how) of the LP and, where it is fractional, of the integer program."""
    model = build(problem)
    relaxed = solve(model, GLOP, integer=False, time_limit_s=deadline - time.perf_counter(), seed=seed)
    if relaxed.status != "optimal" or relaxed.values is None:
        return first, 0.0, "time was up in the LP"
    bound_s = relaxed.objective * model.time_unit_s
    rounded = read_choice(relaxed.values, model)
    if is_integral(relaxed.values, model):
        return _keep(problem, first, rounded), bound_s, "LP, integral"
    rounded_down = greedy.descend(problem, rounded, deadline)
    incumbent = better(problem, first, rounded_down) or first
    if problem.price(incumbent).time_s <= bound_s * (1 + _GAP):
        return incumbent, bound_s, "LP, met by rounding"
    return _branch(problem, model, incumbent, bound_s, deadline, seed)


def _branch(problem: Problem, model: Linear, incumbent: tuple[int, ...], bound_s: float, deadline: float,
            seed: int) -> tuple[tuple[int, ...], float, str]:
    left_s = deadline - time.perf_counter()
    if left_s <= 0:
        return incumbent, bound_s, "LP, fractional, no time left"
    exact = solve(model, SCIP, integer=True, time_limit_s=left_s, seed=seed, hint=_hint(model, incumbent))
    bound_s = max(bound_s, exact.bound * model.time_unit_s if np.isfinite(exact.bound) else 0.0)
    if exact.values is not None:
        incumbent = _keep(problem, incumbent, read_choice(exact.values, model))
    return incumbent, bound_s, "integer program"


def _keep(problem: Problem, known: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    return better(problem, new, known) or known


def _hint(model: Linear, choice: tuple[int, ...]) -> dict[int, float]:
    """One-hot values of `choice` for the solver to start from; it completes the flows."""
    x = np.zeros(model.starts[-1])
    x[model.starts[:-1] + np.array(choice)] = 1.0
    return dict(enumerate(x.tolist()))
