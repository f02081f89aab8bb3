"""The exact search where messages rule nothing out: what its LP rules out and its integer program finds."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.problem.types import Picks, Problem
from autopar.search import dual, exact, exhaustive, greedy
from autopar.search.descent import better, fits
from tests.helpers.problems import random_problem


def next_best(problem: Problem, best: Picks) -> tuple[int, ...] | None:
    """Of the solutions that differ from the optimum `best` in one choice the fastest that is slower."""
    best_s = problem.price(best).time_s
    moved = [(*best[:v], c, *best[v + 1 :]) for v, node in enumerate(problem.nodes) for c in range(len(node.labels))]
    slower = [move for move in moved if fits(problem, move) and problem.price(move).time_s > best_s]
    return min(slower, key=lambda move: problem.price(move).time_s, default=None)


@pytest.fixture
def no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dual,
        "bound",
        lambda problem, known, **options: dual.Bound(0.0, known, [np.arange(len(n.labels)) for n in problem.nodes], 0),
    )
    monkeypatch.setattr(exact, "descend", lambda *args: None)


@pytest.mark.usefixtures("no_messages")
def test_no_better_solution_is_ruled_out() -> None:
    """From a solution that is hardly slower than the optimum, so that much is ruled out."""
    seen = 0
    for seed in range(100, 250):
        problem = random_problem(seed)
        try:
            best = exhaustive.search(problem, time_limit_s=5)
        except InfeasibleError:
            continue
        if (known := next_best(problem, best.choice)) is None:
            continue
        found, best_s = exact.minimise(problem, known, time_limit_s=5), problem.price(best.choice).time_s
        assert problem.price(found.choice).time_s == pytest.approx(best_s), seed
        assert found.bound_s <= best_s * (1 + 1e-9), seed
        seen += "integer program" in found.note
    assert seen > 30


@pytest.mark.usefixtures("no_messages")
def test_no_solver_goes_round_for_ever() -> None:
    """HiGHS did in the presolve of this integer program, whatever its time limit."""
    problem = random_problem(271)
    known = next_best(problem, exhaustive.search(problem, time_limit_s=5).choice)
    assert known is not None
    process = multiprocessing.get_context("fork").Process(
        target=exact.minimise, args=(problem, known), kwargs={"time_limit_s": 1.0}
    )
    process.start()
    process.join(20.0)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_a_linear_program_improves_what_messages_left() -> None:
    """Its bound is no lower, holds for the optimum, and its solution is no slower; some of both get better."""
    raised = faster = 0
    for seed in range(100, 250):
        problem = random_problem(seed)
        try:
            best_s = problem.price(exhaustive.search(problem, time_limit_s=5).choice).time_s
            known = greedy.search(problem, time_limit_s=5).choice
        except InfeasibleError:
            continue
        seen = dual.bound(problem, known, deadline=time.perf_counter() + 5, rounds=1)
        before = better(problem, known, seen.choice) or known
        made = exact.relaxed(problem, before, seen, time_limit_s=5)
        before_s, after_s = (problem.price(choice).time_s for choice in (before, made.choice))
        assert min(seen.bound_s, best_s) <= made.bound_s * (1 + 1e-9) and made.bound_s <= best_s * (1 + 1e-9), seed
        assert fits(problem, made.choice) and best_s * (1 - 1e-9) <= after_s <= before_s, seed
        raised += made.bound_s > seen.bound_s * (1 + 1e-6)
        faster += after_s < before_s * (1 - 1e-6)
    assert raised > 10 and faster > 2
