"""The interface to OR-tools: a model as arrays in; the values of its variables, a bound and readable errors out. Called
by search.exact, search.feasible and the bounds of pipelines.

The model is written as a math_opt ModelProto straight from the arrays and handed to the solver as such: the Python
objects of math_opt (one per variable, and one dictionary entry per value) would take longer than the solver.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    parameters_pb2,
    result_pb2,
    solution_pb2,
    sparse_containers_pb2,
)
from ortools.math_opt.core.python import solver
from pybind11_abseil.status import StatusNotOk

from autopar.errors import AutoparError
from autopar.search.model import Linear

GLOP = parameters_pb2.SOLVER_TYPE_GLOP
HIGHS = parameters_pb2.SOLVER_TYPE_HIGHS

_STATUS = {  # unbounded is not possible: every objective coefficient and variable is at least 0
    result_pb2.TERMINATION_REASON_OPTIMAL: "optimal",
    result_pb2.TERMINATION_REASON_INFEASIBLE: "infeasible",
    result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED: "infeasible",
}


_IMPRECISE = (result_pb2.TERMINATION_REASON_IMPRECISE, result_pb2.TERMINATION_REASON_NUMERICAL_ERROR)


@dataclass(frozen=True)
class Answer:
    """The result of a solver. `values` are those of the variables, None where it has found no solution; `bound` is
    proven, in the units of the objective."""

    status: str  # "optimal", "infeasible", "limit"
    values: np.ndarray | None
    objective: float
    bound: float
    reduced: np.ndarray | None  # reduced costs of an LP at its optimum
    dual: np.ndarray | None  # and the dual values of its rows


class SolverError(AutoparError, RuntimeError):
    """OR-tools refused the model or failed; the message is its own."""


def to_proto(model: Linear, *, integer: bool) -> model_pb2.ModelProto:
    """`model` as a math_opt model; with `integer` the choices are binary."""
    proto = model_pb2.ModelProto()
    variables = proto.variables
    variables.ids.extend(range(model.columns))
    variables.lower_bounds.extend(np.zeros(model.columns).tolist())
    variables.upper_bounds.extend(np.concatenate(model.upper).tolist())
    integers = np.zeros(model.columns, bool)
    integers[: model.starts[-1]] = integer
    variables.integers.extend(integers.tolist())
    objective = np.concatenate(model.objective)
    used = np.flatnonzero(objective)
    proto.objective.linear_coefficients.ids.extend(used.tolist())
    proto.objective.linear_coefficients.values.extend(objective[used].tolist())
    constraints = proto.linear_constraints
    constraints.ids.extend(range(model.rows))
    constraints.lower_bounds.extend(np.concatenate(model.row_lower).tolist())
    constraints.upper_bounds.extend(np.concatenate(model.row_upper).tolist())
    rows, columns, values = (np.concatenate(part) for part in zip(*model.entries, strict=True))
    order = np.argsort(rows * model.columns + columns, kind="stable")
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(rows[order].tolist())
    matrix.column_ids.extend(columns[order].tolist())
    matrix.coefficients.extend(values[order].tolist())
    return proto


def solve(
    model: Linear,
    kind: int,
    *,
    integer: bool,
    time_limit_s: float,
    seed: int = 0,
    gap: float = 1e-9,
) -> Answer:
    """Solve `model` with the solver `kind`, one thread and at most `time_limit_s` seconds (inf: no limit); `gap` is
    relative and only for `integer`.

    Where GLOP gives up because its answer is not exact enough, HiGHS solves the model: it scales rows and columns
    differently. Raises SolverError with the message of OR-tools when the solver fails.
    """
    began = time.perf_counter()
    proto = to_proto(model, integer=integer)
    params = parameters_pb2.SolveParametersProto()
    params.random_seed = seed
    if math.isfinite(time_limit_s):
        params.time_limit.FromNanoseconds(int(max(time_limit_s, 1e-3) * 1e9))
    if kind == HIGHS:  # its presolve may go round for ever, and looks at no clock there
        params.presolve = parameters_pb2.EMPHASIS_OFF
    else:  # HiGHS refuses the option; one thread is what it uses for one LP or a small tree anyway
        params.threads = 1
    if integer:
        params.relative_gap_tolerance = gap
    result = _call(proto, kind, params)
    if kind == GLOP and result.termination.reason in _IMPRECISE:
        return solve(
            model, HIGHS, integer=integer, time_limit_s=time_limit_s - (time.perf_counter() - began), seed=seed, gap=gap
        )
    return _answer(result, model)


def _call(
    proto: model_pb2.ModelProto, kind: int, params: parameters_pb2.SolveParametersProto
) -> result_pb2.SolveResultProto:
    """The solver's result for a model. Raises SolverError where OR-tools fails."""
    name = parameters_pb2.SolverTypeProto.Name(kind)
    try:
        return solver.solve(
            proto,
            kind,
            parameters_pb2.SolverInitializerProto(),
            params,
            model_parameters_pb2.ModelSolveParametersProto(),
            None,
            callback_pb2.CallbackRegistrationProto(),
            None,
            None,
        )
    except StatusNotOk as error:
        raise SolverError(f"{name}: {error.status.message()}") from error


def _answer(result: result_pb2.SolveResultProto, model: Linear) -> Answer:
    """An Answer from the solver's result."""
    reason = result.termination.reason
    bounds = result.termination.objective_bounds
    values = reduced = dual = None
    objective = float("inf")
    for found in result.solutions:
        primal = found.primal_solution
        if values is None and primal.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE:
            values = _dense(primal.variable_values, model.columns)
            objective = primal.objective_value
        proven = found.dual_solution
        if proven.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE:
            reduced, dual = _dense(proven.reduced_costs, model.columns), _dense(proven.dual_values, model.rows)
    return Answer(_STATUS.get(reason, "limit"), values, objective, bounds.dual_bound, reduced, dual)


def _dense(sparse: sparse_containers_pb2.SparseDoubleVectorProto, size: int) -> np.ndarray:
    out = np.zeros(size)
    out[np.array(sparse.ids, dtype=int)] = sparse.values
    return out


def read_choice(values: np.ndarray, model: Linear) -> tuple[int, ...]:
    """The choice of every node: the largest of its one-hot values (over 0.5 where they are integral)."""
    return tuple(int(values[first:end].argmax()) for first, end in itertools.pairwise(model.starts))


def is_integral(values: np.ndarray, model: Linear) -> bool:
    """Whether every one-hot value is 0 or 1."""
    x = values[: model.starts[-1]]
    return bool((np.minimum(x, 1.0 - x) < 1e-6).all())
