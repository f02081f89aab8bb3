"""FlexFlow's search: Metropolis-Hastings over the choices (Jia, Zaharia, Aiken: Beyond Data and Model Parallelism,
MLSys 2019, section 6).

A random node is proposed a random choice; a change of d seconds is accepted with probability min(1, exp(-beta d)). Only
what touches the node is priced again (`State.after`). Bytes over the limit and forbidden pairs cost seconds. A chain
that has not improved for `_PATIENCE` x nodes proposals starts anew from the best solution, colder.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.problem.types import Problem, Solution
from autopar.search import greedy
from autopar.search.descent import better, descend
from autopar.search.state import Penalty, State, scale_s

_PATIENCE = 50  # proposals per node without a new best before a restart
_RESTARTS = 6  # chains, the first one included
_BETA = 30.0  # of the first chain, per share of the start's time; doubled at each restart


def search(problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None) -> Solution:
    """The best solution that the chains met, not worse than `start` nor than `greedy`, where the first one begins.

    The same for the same `seed` unless time runs out. Raises InfeasibleError with the shortfall when nothing fits.
    """
    deadline = time.perf_counter() + time_limit_s
    best = greedy.search(problem, time_limit_s=time_limit_s / 4, start=start).choice
    rng = np.random.default_rng(seed)
    chain = _Chain(problem, best, rng)
    for restart in range(_RESTARTS):
        chain.run(_BETA * 2.0**restart, deadline)
    polished = better(problem, chain.best, descend(problem, chain.best, deadline))
    assert polished is not None, "the first chain begins at a feasible solution"
    return Solution(polished, "mcmc", note=f"{chain.proposals:,} proposals, {chain.accepted:,} accepted, seed {seed}")


class _Chain:
    """The walk, its best feasible solution and its counters."""

    def __init__(self, problem: Problem, start: tuple[int, ...], rng: np.random.Generator) -> None:
        self.state, self.rng, self.best = State(problem, start), rng, start
        scale = scale_s(problem)
        self.penalty = Penalty(scale / max(1.0, problem.memory_limit_bytes), scale)
        self.best_s = self.time_s = float(self.state.score(self.state.totals, self.penalty)[0])
        self.sizes = np.array([len(node.labels) for node in problem.nodes])
        self.unit_s = self.best_s or scale
        self.proposals = self.accepted = 0

    def run(self, beta: float, deadline: float) -> None:
        """One chain from the best solution, until it stops improving or `deadline` (time.perf_counter)."""
        self.state.reset(self.best)
        self.time_s, idle = self.best_s, 0
        movable = np.flatnonzero(self.sizes > 1)
        while len(movable) and idle < _PATIENCE * len(movable) and time.perf_counter() < deadline:
            improved = self._propose(int(self.rng.choice(movable)), beta)
            idle = 0 if improved else idle + 1

    def _propose(self, v: int, beta: float) -> bool:
        """One proposal; True when it gives a new best."""
        self.proposals += 1
        c = int(self.rng.integers(self.sizes[v] - 1))
        c += c >= self.state.choice[v]
        totals = self.state.after(v, np.array([c]))
        time_s = float(self.state.score(totals, self.penalty)[0])
        if time_s > self.time_s and self.rng.random() >= np.exp(-beta * (time_s - self.time_s) / self.unit_s):
            return False
        self.accepted += 1
        self.state.move(v, c)
        self.time_s = time_s
        if time_s < self.best_s * (1 - 1e-9) and self.state.feasible():
            self.best_s, self.best = time_s, tuple(self.state.choice)
            return True
        return False
