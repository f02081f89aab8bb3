"""The exact part of the strategy `ilp`: from a feasible solution to the optimum, or as close as time allows, with a
proven bound.

    1. message passing (`dual.bound`): a bound, a better solution, choices ruled out
    2. the LP relaxation over the choices that are left; again while its reduced costs rule out many
    3. where the LP solution is fractional, the integer program over the choices that are left

Every step keeps all solutions that are better than the best known one, so a bound of the reduced problem is one of the
whole problem. When time is up, the result has the largest bound that was proven until then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.problem.presolve import select
from autopar.problem.types import Picks, Problem
from autopar.search import dual
from autopar.search.descent import better, descend
from autopar.search.model import Linear, build
from autopar.search.solver import HIGHS, Answer, is_integral, read_choice, solve

GAP = 1e-7  # relative: closer than this is called optimal
_DUAL_SHARE = 0.25  # of the time limit, at most, for message passing
_DUAL_EFFORT = 2500.0  # units of dual.effort that message passing may take, about 0.4 s: its bound rises early
_LP_ROUNDS = 4  # LPs in a row, at most
_WORTHWHILE = 0.9  # another LP when the last one left less than this share of the choices


@dataclass(frozen=True)
class Exact:
    """`bound_s` holds for every feasible solution; `note` says which steps were needed."""

    choice: Picks
    bound_s: float
    note: str


@dataclass
class _Run:
    """The state of one run of `minimise`: `problem` is `whole` with only the choices `kept` of each node, `best` is the
    best known solution, in choices of `whole`."""

    whole: Problem
    problem: Problem
    kept: list[np.ndarray]
    best: tuple[int, ...]
    bound_s: float
    deadline: float
    seed: int
    cutoff_s: float
    gap: float

    @property
    def best_s(self) -> float:
        """Seconds of the best known solution."""
        return self.whole.price(self.best).time_s

    @property
    def closed(self) -> bool:
        """Whether the bound is within the gap of the best known solution, or has reached `cutoff_s`."""
        return self.bound_s >= min(self.best_s, self.cutoff_s) * (1 - max(GAP, self.gap))

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative past the deadline."""
        return self.deadline - time.perf_counter()

    def offer(self, choice: Picks | None) -> None:
        """Take `choice` (of the present problem) as the best solution if it is feasible and better."""
        if choice is not None:
            lifted = tuple(int(k[c]) for k, c in zip(self.kept, choice, strict=True))
            self.best = better(self.whole, self.best, lifted) or self.best

    def raise_bound(self, bound_s: float) -> None:
        """Take a bound of the present problem. It holds for `whole` up to the time of the best known solution."""
        if np.isfinite(bound_s):
            self.bound_s = max(self.bound_s, min(bound_s, self.best_s))

    def shrink(self, keep: list[np.ndarray]) -> None:
        """Keep only the choices `keep` of the present problem, and those of the best known solution."""
        own = self.incumbent()
        keep = [np.union1d(k, [c]) for k, c in zip(keep, own, strict=True)]
        self.problem = select(self.problem, keep)
        self.kept = [old[new] for old, new in zip(self.kept, keep, strict=True)]

    def incumbent(self) -> tuple[int, ...]:
        """The best known solution, in choices of the present problem."""
        return tuple(int(np.searchsorted(k, c)) for k, c in zip(self.kept, self.best, strict=True))


def minimise(
    problem: Problem,
    known: tuple[int, ...],
    *,
    time_limit_s: float,
    seed: int = 0,
    cutoff_s: float = np.inf,
    gap: float = 0.0,
) -> Exact:
    """The optimum of `problem`, or with time short the best found, from the feasible solution `known`.

    Ends early once it has proven that nothing faster than `cutoff_s` exists, or nothing better than `gap` (relative).
    """
    kept = [np.arange(len(node.labels)) for node in problem.nodes]
    run = _Run(problem, problem, kept, known, 0.0, time.perf_counter() + time_limit_s, seed, cutoff_s, gap)
    note = _solve(run, _DUAL_SHARE * time_limit_s)
    return Exact(run.best, run.bound_s, note)


def relaxed(problem: Problem, known: tuple[int, ...], seen: dual.Bound, *, time_limit_s: float) -> Exact:
    """What one linear program over the choices that message passing left (`seen`, and `known`, the better solution)
    proves and finds, from its rounded solution by descent."""
    kept = [np.arange(len(node.labels)) for node in problem.nodes]
    run = _Run(problem, problem, kept, known, 0.0, time.perf_counter() + time_limit_s, 0, np.inf, 0.0)
    run.raise_bound(seen.bound_s)
    run.shrink(seen.keep)
    note = f"LP, {_relax(run) or 'fractional'}"
    return Exact(run.best, run.bound_s, note)


def _solve(run: _Run, dual_s: float) -> str:
    """Improve `run` until it is closed or time is up. Returns a note on the steps that were needed."""
    deadline = min(run.deadline, time.perf_counter() + dual_s)
    rounds = int(_DUAL_EFFORT / dual.effort(run.problem))  # work and not time, so that a busy machine finds the same
    ruled = dual.bound(
        run.problem, run.best, deadline=deadline, rounds=min(dual.ROUNDS, max(1, rounds)), cutoff_s=run.cutoff_s
    )
    run.offer(ruled.choice)
    run.raise_bound(ruled.bound_s)
    run.shrink(ruled.keep)
    note = f"message passing left {_choices(run.problem)} of {_choices(run.whole)} choices"
    if run.closed:
        return note
    for _ in range(_LP_ROUNDS):
        size = _choices(run.problem)
        how = _relax(run)
        if how or run.closed:
            return f"{note}; LP, {how or 'met by rounding'}"
        if _choices(run.problem) > _WORTHWHILE * size:
            break
    return f"{note}; LP, fractional; {_branch(run)}"


def _relax(run: _Run) -> str:
    """Solve one LP: take its bound and its rounded solution, and drop the choices that its reduced costs rule out.
    Returns why `run` is to end, "" to go on."""
    model = build(run.problem)
    # GLOP takes 1.5 to 2 times as long, by the dual simplex; by the primal one four to ten times
    answer = solve(model, HIGHS, integer=False, time_limit_s=run.left_s, seed=run.seed)
    if answer.status == "infeasible":  # only for rounding: the best solution is always part of the problem
        return "infeasible to the solver's tolerance"
    if answer.status != "optimal" or answer.values is None:
        return "time was up"
    run.raise_bound(answer.objective * model.time_unit_s)
    rounded = read_choice(answer.values, model)
    run.offer(rounded)
    if is_integral(answer.values, model):
        return "integral"
    run.offer(descend(run.problem, rounded, run.deadline))
    if run.left_s <= 0:
        return "fractional, no time left"
    run.shrink(_by_reduced_cost(run, model, answer))
    return ""


def _choices(problem: Problem) -> int:
    """The number of choices of all nodes together."""
    return sum(len(node.labels) for node in problem.nodes)


def _by_reduced_cost(run: _Run, model: Linear, relaxed: Answer) -> list[np.ndarray]:
    """Choices that a better solution than the best may use: x[v,c] = 1 costs at least the LP plus its reduced cost."""
    assert relaxed.reduced is not None and relaxed.values is not None
    x = slice(0, int(model.starts[-1]))
    useful = (relaxed.objective + relaxed.reduced[x]) * model.time_unit_s <= run.best_s * (1 + GAP)
    useful |= relaxed.values[x] > 1e-6
    return [np.flatnonzero(part) for part in np.split(useful, model.starts[1:-1])]


def _branch(run: _Run) -> str:
    """The integer program over what is left, from the best solution."""
    model = build(run.problem)
    exact = solve(model, HIGHS, integer=True, time_limit_s=run.left_s, seed=run.seed, gap=max(1e-9, run.gap))
    if exact.values is not None:
        run.offer(read_choice(exact.values, model))
    run.raise_bound(run.best_s if exact.status == "infeasible" else exact.bound * model.time_unit_s)
    return f"integer program over {_choices(run.problem)} choices"
