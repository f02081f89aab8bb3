"""The solution that needs least memory: where searches start that found nothing that fits, and the proof that nothing does."""

from __future__ import annotations

import numpy as np

from autopar.errors import InfeasibleError
from autopar.problem.types import Problem
from autopar.search.model import build
from autopar.search.solver import SCIP, read_choice, solve

_GIB = 2**30


def least_memory(problem: Problem, *, time_limit_s: float) -> tuple[int, ...]:
    """A feasible solution, of least memory among all.

    Raises InfeasibleError with the shortfall (least bytes reachable against the limit), or saying that every solution
    uses a forbidden pair, or that time was up before either was known.
    """
    model = build(problem, minimise_memory=True)
    answer = solve(model, SCIP, integer=True, time_limit_s=time_limit_s)
    if answer.status == "infeasible":
        raise InfeasibleError(
            f"problem {problem.name}: every combination of choices uses a forbidden pair of layouts; "
            f"allow more options for its {len(problem.nodes)} nodes")
    if answer.values is not None:
        choice = read_choice(answer.values, model)
        if fits(problem, choice):
            return choice
    if answer.status == "optimal":
        raise shortfall(problem, problem.price(choice).memory_bytes)
    raise InfeasibleError(
        f"problem {problem.name}: no solution within {problem.memory_limit_bytes / _GIB:.3f} GiB per device was found in "
        f"{time_limit_s:.1f} s, and none was proven impossible (at least "
        f"{max(0.0, answer.bound) * model.memory_unit_bytes / _GIB:.3f} GiB are needed); give more time")


def shortfall(problem: Problem, least_bytes: float) -> InfeasibleError:
    """The error that says what is missing, given the least memory that any solution reaches."""
    limit = problem.memory_limit_bytes
    return InfeasibleError(
        f"problem {problem.name}: the solution of least memory needs {_size(least_bytes)} per device, the limit is "
        f"{_size(limit)}: {_size(least_bytes - limit)} are missing; use more devices, a smaller batch or a smaller model")


def fits(problem: Problem, choice: tuple[int, ...]) -> bool:
    """Whether `choice` is feasible."""
    cost = problem.price(choice)
    return cost.feasible and cost.memory_bytes <= problem.memory_limit_bytes * (1 + 1e-9)


def better(problem: Problem, one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The feasible one of least time (None: neither); `one` where they are equal."""
    candidates = [c for c in (one, other) if c is not None and fits(problem, c)]
    return min(candidates, key=lambda c: problem.price(c).time_s, default=None)


def _size(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.3f} GiB" if size_bytes >= 0.1 * _GIB else f"{int(np.ceil(size_bytes))} bytes"
