"""The strategy `ilp`: linear and integer programming with OR-tools; the formulation is in search/model.py.

presolve (exact) -> a first solution (`greedy`) -> `exact.minimise` (message passing, LP, integer program) ->
the solution in choices of the whole problem
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.problem.presolve import allowed, presolve
from autopar.problem.types import Picks, Problem, Solution
from autopar.search import dual, greedy
from autopar.search.descent import better, descend, fits
from autopar.search.exact import GAP, minimise, relaxed
from autopar.search.feasible import check_room
from autopar.search.state import State


def search(
    problem: Problem,
    *,
    time_limit_s: float,
    seed: int = 0,
    start: tuple[int, ...] | None = None,
    cutoff_s: float = math.inf,
    gap: float = 0.0,
) -> Solution:
    """The optimum, or with time short the best solution found, never worse than `start`; `bound_s` is proven either
    way.

    `cutoff_s`: the caller has something that fast already, so a proof that nothing faster exists ends the search.
    `gap`: a solution proven to be that close (relative) to the optimum is good enough.

    Deterministic for a seed unless time runs out. Raises InfeasibleError with the shortfall when nothing fits.
    """
    deadline = time.perf_counter() + time_limit_s
    check_room(problem)
    small, restore = presolve(problem)
    try:
        first = greedy.search(small, time_limit_s=time_limit_s).choice
    except InfeasibleError:
        if start is None or not fits(problem, start):
            raise
        return finish(problem, start, 0.0, "time was up before anything but the start was found")
    first = better(small, first, _with_fewer_reshards(small, deadline - time.perf_counter())) or first
    found = minimise(small, first, time_limit_s=deadline - time.perf_counter(), seed=seed, cutoff_s=cutoff_s, gap=gap)
    best = restore(found.choice)
    if start is not None and fits(problem, start) and problem.price(start).time_s < problem.price(best).time_s:
        best = start
    return finish(problem, best, found.bound_s, found.note)


def glance(
    problem: Problem,
    *,
    time_limit_s: float,
    cutoff_s: float = math.inf,
    start: tuple[int, ...] | None = None,
    sized: bool = True,
) -> Solution:
    """A first solution and bound by message passing, and where these are FAR from each other by one linear program, in
    a fraction of the time of `search`: enough to see which of several problems are worth solving. Dominated choices are
    not looked for, since there are few.

    Ends early once it is proven that nothing is faster than `cutoff_s`. Descent also begins at `start`, which may do
    what is forbidden here. Raises InfeasibleError as `search` does; if the shortfall need not be `sized`, as soon as
    there is one.
    """
    deadline = time.perf_counter() + time_limit_s
    check_room(problem)
    small, restore = allowed(problem)
    found, seen = _by_messages(small, time_limit_s, cutoff_s, sized=sized)
    bound_s, note = seen.bound_s, f"message passing, {seen.rounds} rounds"
    few = sum(map(len, seen.keep)) <= FEW_CHOICES
    if few and bound_s < min(cutoff_s, small.price(found).time_s * (1 - FAR)):
        near = relaxed(small, found, seen, time_limit_s=deadline - time.perf_counter())
        found, bound_s, note = near.choice, near.bound_s, f"{note}; {near.note}"
    best = restore(found)
    if start is not None:
        best = better(problem, best, descend(problem, start, deadline)) or best
    return finish(problem, best, bound_s, note)


GLANCE_ROUNDS = 6  # of message passing in a glance
FAR = 0.05
"""Relative: a solution farther from its bound than this is worth a linear program."""
FEW_CHOICES = 4000
"""Choices left of which a linear program is solved at a glance: that takes about half a second then, and ten times as
long for twice as many."""
DEARER = 2.0
"""Factor on the seconds of reshards for a second start, which leads to a solution with fewer of them."""


def _by_messages(
    problem: Problem, time_limit_s: float, cutoff_s: float = math.inf, *, sized: bool = True
) -> tuple[tuple[int, ...], dual.Bound]:
    """A solution by descent and GLANCE_ROUNDS of message passing, and the bound that these prove. Raises
    InfeasibleError where nothing fits (`sized` as in `glance`)."""
    state = State(problem, [-1] * len(problem.nodes))
    first = greedy.search(problem, time_limit_s=time_limit_s, state=state, sized=sized).choice
    seen = dual.bound(
        problem,
        first,
        deadline=time.perf_counter() + time_limit_s,
        rounds=GLANCE_ROUNDS,
        cutoff_s=cutoff_s,
        state=state,
    )
    return better(problem, first, seen.choice) or first, seen


def _with_fewer_reshards(problem: Problem, time_limit_s: float) -> tuple[int, ...] | None:
    """A local optimum of `problem`, reached from a solution with fewer reshards: that of the same problem in which
    reshards are dearer. None where it does not fit. Descent from each node's cheapest choice tends to end at solutions
    that change layouts all the time."""
    dearer = replace(problem, nets=tuple(replace(net, cost_s=DEARER * net.cost_s) for net in problem.nets))
    try:
        found, _ = _by_messages(dearer, time_limit_s)
    except InfeasibleError:
        return None
    return better(problem, found, descend(problem, found, time.perf_counter() + time_limit_s))


def finish(problem: Problem, choice: Picks, bound_s: float, note: str) -> Solution:
    """The Solution of a choice and a bound. The bound is clipped to the time of the choice, because solvers round."""
    time_s = problem.evaluate(choice).time_s
    bound_s = min(max(bound_s, 0.0), time_s)
    gap = (time_s - bound_s) / time_s if time_s > 0 else 0.0
    optimal = gap <= GAP
    return Solution(choice, "ilp", bound_s, optimal, f"{note}; {'optimal' if optimal else f'gap {gap:.2%}'}")
