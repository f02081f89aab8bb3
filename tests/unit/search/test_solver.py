"""The door to OR-tools: statuses, time limits and readable errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ortools.math_opt import parameters_pb2, result_pb2

from autopar.search import solver
from autopar.search.model import build
from autopar.search.solver import SolverError, solve
from tests.helpers.problems import random_problem

SCIP, CP_SAT = parameters_pb2.SOLVER_TYPE_GSCIP, parameters_pb2.SOLVER_TYPE_CP_SAT
"""Solvers that nothing selects, to compare with."""


@pytest.mark.parametrize("kind", [solver.GLOP, solver.HIGHS, SCIP])
def test_lps_agree(kind: int) -> None:
    model = build(random_problem(1))
    expected = solve(model, solver.GLOP, integer=False, time_limit_s=5)
    answer = solve(model, kind, integer=False, time_limit_s=5)
    assert (answer.status, expected.status) == ("optimal", "optimal")
    assert answer.objective == pytest.approx(expected.objective, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_both_solvers_of_linear_programs_have_the_same_optimum(seed: int) -> None:
    model = build(random_problem(seed))
    expected = solve(model, solver.GLOP, integer=False, time_limit_s=5)
    answer = solve(model, solver.HIGHS, integer=False, time_limit_s=5)
    assert answer.status == expected.status
    assert answer.objective == pytest.approx(expected.objective, rel=1e-7)


@pytest.mark.parametrize("kind", [SCIP, solver.HIGHS, CP_SAT])
def test_integer_solvers_agree(kind: int) -> None:
    model = build(random_problem(1))
    answer = solve(model, kind, integer=True, time_limit_s=5)
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(solve(model, SCIP, integer=True, time_limit_s=5).objective, abs=1e-6)
    assert answer.bound <= answer.objective + 1e-6


def test_infeasible_has_no_values() -> None:
    model = build(random_problem(1))
    row = model.add_rows(1, 2.0, 2.0)
    model.add_entries(np.array([row]), np.array([0]), 1.0)
    answer = solve(model, solver.GLOP, integer=False, time_limit_s=5)
    assert (answer.status, answer.values) == ("infeasible", None)


def test_a_refused_model_says_why() -> None:
    model = build(random_problem(1))
    model.upper[0] = np.full_like(model.upper[0], np.nan)
    with pytest.raises(SolverError, match=r"GLOP.*[Nn]a[Nn]"):
        solve(model, solver.GLOP, integer=False, time_limit_s=5)


@pytest.mark.parametrize(
    "reason", [result_pb2.TERMINATION_REASON_IMPRECISE, result_pb2.TERMINATION_REASON_NUMERICAL_ERROR]
)
def test_where_glop_is_not_exact_enough_highs_is_asked(reason: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LP of 405B on 512 devices; to stop there was to have no bound, and no integer program."""
    model, call, asked = build(random_problem(1)), solver._call, []

    def imprecise(proto: Any, kind: int, *more: Any) -> Any:
        asked.append(kind)
        result = call(proto, kind, *more)
        if kind == solver.GLOP:
            result.ClearField("solutions")
            result.termination.reason = reason
        return result

    expected = solve(model, solver.GLOP, integer=False, time_limit_s=5)
    monkeypatch.setattr(solver, "_call", imprecise)
    answer = solve(model, solver.GLOP, integer=False, time_limit_s=5)
    assert asked == [solver.GLOP, solver.HIGHS] and answer.status == "optimal"
    assert (
        answer.objective == pytest.approx(expected.objective, abs=1e-6)
        and answer.reduced is not None
        and answer.dual is not None
    )
