"""Solutions of little memory, and the proof that no solution fits. Called where a search has found nothing within the
memory limit."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.problem.types import Problem
from autopar.search.descent import descend, fits
from autopar.search.exact import GAP, minimise
from autopar.search.model import build
from autopar.search.solver import HIGHS, read_choice, solve

_GIB = 2**30  # bytes


def feasible(problem: Problem, *, time_limit_s: float, sized: bool = True) -> tuple[int, ...]:
    """A solution within the memory limit: by descent on bytes, or where that does not fit by `least_memory`, whose
    errors it raises; `sized` as there."""
    deadline = time.perf_counter() + time_limit_s
    found = descend(in_bytes(problem), None, deadline)
    return (
        found
        if found is not None and fits(problem, found)
        else least_memory(problem, time_limit_s=deadline - time.perf_counter(), sized=sized)
    )


def least_memory(problem: Problem, *, time_limit_s: float, sized: bool = True) -> tuple[int, ...]:
    """A feasible solution, of least memory among all (or the first one met that fits, when time is short).

    Raises InfeasibleError with the shortfall (least bytes reachable against the limit; when time is short, or if it
    need not be `sized`, what is proven of them), or saying that every solution uses a forbidden pair, or that time was
    up before anything was known.
    """
    deadline = time.perf_counter() + time_limit_s
    bytes_problem = in_bytes(problem)
    first = descend(bytes_problem, None, deadline)
    if first is None:
        first = _allowed(bytes_problem, deadline)
    over_bytes = problem.memory_limit_bytes * (1 + 2 * GAP)
    least = minimise(
        bytes_problem,
        first,
        time_limit_s=deadline - time.perf_counter(),
        cutoff_s=math.inf if sized else over_bytes,
    )
    if fits(problem, least.choice):
        return least.choice
    needed = problem.price(least.choice).memory_bytes
    if least.bound_s >= needed * (1 - GAP):
        raise shortfall(problem, needed)
    if least.bound_s > problem.memory_limit_bytes * (1 + GAP):
        raise shortfall(problem, least.bound_s)
    raise InfeasibleError(
        f"problem {problem.name}: no solution within {_size(problem.memory_limit_bytes)} per device was found in "
        f"{time_limit_s:.1f} s; the best needs {_size(needed)}, and at least {_size(least.bound_s)} are needed; give "
        "more time",
        bound_s=0.0,
    )


def check_room(problem: Problem) -> None:
    """Raises InfeasibleError where the limit is below the sum of the least bytes of every node and every net: no search
    is needed to see that."""
    if np.isinf(problem.memory_limit_bytes):
        return
    nodes = sum(float(node.memory_bytes[np.isfinite(node.cost_s)].min(initial=np.inf)) for node in problem.nodes)
    nets = sum(float(net.memory_bytes[np.isfinite(net.cost_s)].min(initial=np.inf)) for net in problem.nets if net.uses)
    if np.isfinite(nodes + nets) and nodes + nets > problem.memory_limit_bytes * (1 + GAP):
        raise shortfall(problem, nodes + nets)


def in_bytes(problem: Problem) -> Problem:
    """`problem` with its bytes as seconds, and without memory limit and overlap groups: its optimum is the solution of
    least memory."""
    nodes = tuple(
        replace(
            node,
            cost_s=np.where(np.isfinite(node.cost_s), node.memory_bytes, np.inf),
            memory_bytes=np.zeros_like(node.memory_bytes),
            group=-1,
            lane=None,
        )
        for node in problem.nodes
    )
    nets = tuple(
        replace(
            net,
            cost_s=np.where(np.isfinite(net.cost_s), net.memory_bytes, np.inf),
            memory_bytes=np.zeros_like(net.memory_bytes),
            group=-1,
        )
        for net in problem.nets
    )
    return replace(problem, nodes=nodes, nets=nets, groups=0, lanes=(), memory_limit_bytes=float("inf"))


def _allowed(problem: Problem, deadline: float) -> tuple[int, ...]:
    """A solution without forbidden pairs, by the integer program; raises InfeasibleError when there is none."""
    model = build(problem)
    answer = solve(model, HIGHS, integer=True, time_limit_s=deadline - time.perf_counter())
    if answer.values is not None:
        return read_choice(answer.values, model)
    proven = "every combination" if answer.status == "infeasible" else "every combination tried before time was up"
    raise InfeasibleError(
        f"problem {problem.name}: {proven} of choices uses a forbidden pair of layouts; allow more options for "
        f"its {len(problem.nodes)} nodes",
        bound_s=math.inf if answer.status == "infeasible" else 0.0,
    )


def shortfall(problem: Problem, least_bytes: float) -> InfeasibleError:
    """The error that nothing fits, where every solution needs at least `least_bytes`."""
    limit = problem.memory_limit_bytes
    return InfeasibleError(
        f"{problem.name or 'the problem'} needs {_size(least_bytes)} per device or more, the limit is {_size(limit)}: "
        f"{_size(least_bytes - limit)} are missing; use more devices, a smaller batch or a smaller model",
        missing_bytes=least_bytes - limit,
    )


def _size(size_bytes: float) -> str:
    """A number of bytes as text."""
    return f"{size_bytes / _GIB:.3f} GiB" if size_bytes >= 0.1 * _GIB else f"{int(np.ceil(size_bytes))} bytes"
