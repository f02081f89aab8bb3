"""Which results to keep: the corners of the frontier against brute force and against chance."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.problem.remat_frontier import Choices, Point, point
from autopar.problem.rerun import keepable
from tests.helpers.verify import subject

Numbers = dict[str, float]


def _drawn(program: Program, scope: str, seed: int) -> tuple[Numbers, Numbers]:
    """Random seconds and bytes of every operator of a scope; views cost nothing."""
    rng = np.random.default_rng(seed)
    names = [op.name for op in program.ops.values() if op.scope == scope]
    seconds = {n: float(rng.uniform(0.1, 1.0)) if program.ops[n].bytes else 0.0 for n in names}
    return seconds, {n: float(rng.uniform(0.1, 1.0)) for n in names}


def _hull(points: list[Point]) -> list[tuple[float, float]]:
    """The corners of the lower convex hull of (bytes, seconds), from the fewest bytes on."""
    best: list[tuple[float, float]] = []
    for p in sorted({(round(p.nbytes, 9), round(p.seconds, 9)) for p in points}):
        if best and p[1] >= best[-1][1]:
            continue
        while (
            len(best) > 1
            and (best[-1][1] - best[-2][1]) * (p[0] - best[-2][0])
            >= (p[1] - best[-2][1]) * (best[-1][0] - best[-2][0]) - 1e-12
        ):
            best.pop()
        best.append(p)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_corners_are_those_of_all_choices(seed: int) -> None:
    who = subject("gpt").captured
    program = read(who.gm, who.hints, training=True, device="cpu")
    (scope,) = program.runs
    names = [op.name for op in program.ops.values() if op.scope == scope and keepable(op)]
    assert 3 < len(names) < 10
    seconds, nbytes = _drawn(program, scope, seed)
    every = [
        point(program, scope, seconds, nbytes, kept)
        for n in range(len(names) + 1)
        for kept in itertools.combinations(names, n)
    ]
    assert _hull(Choices(program, scope, seconds, nbytes).corners) == _hull(every)


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-llama", "hf-t5"])
def test_nothing_found_by_chance_is_below_the_corners(name: str) -> None:
    who = subject(name).captured
    program = read(who.gm, who.hints, training=True, device="cpu")
    for scope in program.runs:
        seconds, nbytes = _drawn(program, scope, 0)
        found = Choices(program, scope, seconds, nbytes).corners
        assert found[0].kept == () and len(found) > 3
        assert [p.nbytes for p in found] == sorted(p.nbytes for p in found) and [p.seconds for p in found] == sorted(
            (p.seconds for p in found), reverse=True
        )
        names = [op.name for op in program.ops.values() if op.scope == scope and keepable(op)]
        rng, corners = np.random.default_rng(1), _hull(found)
        for _ in range(200):
            kept = tuple(n for n in names if rng.random() < rng.random())
            by_chance = point(program, scope, seconds, nbytes, kept)
            assert _hull([*found, by_chance]) == corners


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-llama", "hf-t5"])
def test_the_fastest_that_fits_is_found_without_walking_all_corners(name: str) -> None:
    who = subject(name).captured
    program = read(who.gm, who.hints, training=True, device="cpu")
    for scope in program.runs:
        choices = Choices(program, scope, *_drawn(program, scope, 2))
        corners, asked = choices.corners, 0

        def fits(found: Point, limit_bytes: float) -> bool:
            nonlocal asked
            asked += 1
            return found.nbytes <= limit_bytes

        for wanted in corners:
            assert choices.fastest(partial(fits, limit_bytes=wanted.nbytes)) == wanted
        assert asked < len(corners) ** 2 / 2
        assert choices.fastest(lambda found: False) == corners[0]
