"""Bounds by cases of how long passes wait: each case holds for its solutions, and all together for all of them."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from autopar.cluster import Cluster
from autopar.joint import wait_cases
from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.effort import MOST_ROUNDS, Effort
from autopar.joint.relaxed import Key, Relaxed, Span, Sums
from autopar.joint.relaxed_bounds import cut_s
from autopar.joint.relaxed_solving import Solver
from autopar.joint.relaxed_steps import alone
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Alone
from autopar.joint.shapes import Shape
from autopar.joint.wait_cases import _Case, _nothing, _split, bound_s
from autopar.pipeline.single_stage import step_cost
from autopar.problem.pass_quantities import COMPUTE, WAITED
from autopar.problem.pass_tables import FORWARD
from autopar.problem.settings import Settings
from autopar.recipes.free import space
from autopar.request import Request
from autopar.search import ilp
from tests.helpers.verify import subject
from tests.unit.joint.test_relaxed import alone_on, least_s, solutions

ON = [
    ("hf-gpt2", "h100:2x2", (2, 2)),
    ("hf-llama", "h100:2x4", (2, 4)),
    ("hf-llama", "h100:2x4", (2, 2, 2)),
    ("hf-mixtral", "l4:1x4", (4,)),
]


def own_case(relaxed: Relaxed, choice: tuple[int, ...]) -> Relaxed:
    """What is relaxed to solutions that wait in each pass about as long as `choice` does."""
    return replace(relaxed, spans=own_spans(relaxed, relaxed.sums(choice), 1.01))


def own_spans(relaxed: Relaxed, sums: Sums, wide: float) -> dict[tuple[Key, str], Span]:
    """Spans so wide around what each pass waits."""
    return {of: (ratio / wide, ratio * wide) for of, ratio in ratios(relaxed, sums).items() if ratio > 0}


def ratios(relaxed: Relaxed, sums: Sums) -> dict[tuple[Key, str], float]:
    """How many times as long as each pass computes it waits for collectives: all of them, and by what they take of each
    level's link."""
    found, tables = {}, relaxed.passing
    for key, of in sums.passes.items():
        for level in dict.fromkeys(("", *tables.link)):
            waits_s = (
                sum(of[tables.links_waited(a)] for a in range(tables.axes) if tables.link[a] == level)
                if level
                else of[WAITED]
            )
            if of[COMPUTE] > 0:
                found[key, level] = float(waits_s / of[COMPUTE])
    return found


@pytest.mark.parametrize(("name", "cluster", "mesh"), ON)
def test_in_its_own_case_a_solution_takes_as_long_at_least(name: str, cluster: str, mesh: tuple[int, ...]) -> None:
    here, found = alone_on(name, cluster, mesh)
    relaxed, more = alone(here.passing, here.plain, math.inf), 0
    for choice in found:
        took_s, plain_s, case_s = (
            step_cost(here.plain.with_limit(math.inf), choice, here.forward).time_s,
            least_s(relaxed, choice),
            least_s(own_case(relaxed, choice), choice),
        )
        assert plain_s * (1 - 1e-6) <= case_s <= took_s * (1 + 1e-6)
        more += case_s > plain_s * (1 + 1e-4)
    assert more or len(mesh) == 1


@pytest.mark.parametrize(("name", "cluster", "mesh"), [pytest.param(*on, marks=pytest.mark.slow) for on in ON[:2]])
def test_all_cases_together_hold_for_the_best_plan_there_is(name: str, cluster: str, mesh: tuple[int, ...]) -> None:
    effort = Effort(MOST_ROUNDS, 6)
    who = subject(name)
    context = SearchContext(
        who.captured.gm, {**who.captured.hints, "b": 64}, Request(Cluster.parse(cluster), Settings("train"))
    )
    here = Alone(context, Shape(1, mesh, 1))
    best = context.whole.candidate(mesh, space(mesh), "search", partial(ilp.search, time_limit_s=10, gap=0.01))
    best_s = context.whole.honed(best, lambda: False).cost.time_s
    relaxed = alone(here.passing, here.plain, math.inf)

    def cutting() -> Cutting:
        return Cutting([Level(relaxed)], Solver([relaxed], exact=True))

    plain_s, cases_s = cutting().bound_s(math.inf), bound_s(cutting(), relaxed.keys, math.inf, effort)
    assert 0 < plain_s * (1 - 1e-9) <= cases_s <= best_s
    assert all(
        step_cost(here.plain.with_limit(math.inf), choice, here.forward).time_s >= cases_s * (1 - 1e-9)
        for choice in solutions(here.plain.problem)
    )
    assert cut_s([relaxed], math.inf, effort, [], relaxed.keys) == pytest.approx(cases_s, rel=2e-3)
    assert bound_s(cutting(), relaxed.keys, math.inf, Effort(MOST_ROUNDS, 1)) == pytest.approx(plain_s)


@pytest.mark.parametrize(("left_s", "made"), [(0.0, 1), (100.0, 9)])
def test_no_case_is_begun_when_time_is_up(left_s: float, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = alone_on(*ON[1])
    relaxed, cases = alone(here.passing, here.plain, math.inf), list[_Case]()

    def case(cutting: Cutting, keys: object, cutoff_s: float, number: int) -> _Case:
        cases.append(_Case(1.0, number, cutting.levels[0].relaxed, {}))
        return cases[-1]

    monkeypatch.setattr(wait_cases, "_case", case)
    monkeypatch.setattr(wait_cases, "_split", lambda case, keys: ((("", FORWARD), ""), [(0.0, 1.0), (1.0, 2.0)]))
    effort = Effort(MOST_ROUNDS, 8, ends_at=time.monotonic() + left_s)
    assert bound_s(Cutting([Level(relaxed)], _nothing), relaxed.keys, math.inf, effort) == 1.0 and len(cases) == made


def test_spans_that_are_split_are_whole() -> None:
    """Nothing is between them or in none, and they come to an end."""
    here, found = alone_on(*ON[1])
    relaxed = alone(here.passing, here.plain, math.inf)
    mean, key, spans = dict(relaxed.sums(found[0]).passes), ("", FORWARD), dict[tuple[Key, str], Span]()
    for _ in range(400):
        split = _split(_Case(0.0, 0, replace(relaxed, spans=spans), mean), [key])
        if split is None:
            break
        of, parts = split
        before = spans.get(of, (0.0, math.inf))
        assert parts[0][0] == before[0] and parts[-1][1] == before[1] and len(parts) > 1
        assert all(one[1] == other[0] for one, other in pairwise(parts)) and all(low < high for low, high in parts)
        at = ratios(relaxed, relaxed.sums(found[0]))[of]
        spans = {**spans, of: next(part for part in parts if part[0] <= at <= part[1])}
    else:
        raise AssertionError("it does not come to an end")
