"""What a search has found when its time is up: everything is looked at before anything is solved, and more time is
never for a worse plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from autopar import timer
from autopar.bestfirst import Elsewhere
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import UNPROVEN, background_proof, fastest
from autopar.joint.choice import staged
from autopar.joint.explore import Explorer
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import FREE, SEARCH, Space
from autopar.onestage import SIMPLER, plan_with
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.kinds import far
from tests.helpers.planned import BATCH, graph

SHORT_BYTES = 140 * 2**20
"""The fastest plan takes more, with nothing run again."""


class Clock:
    """Time that goes by with what the search says: a second for each thing it does."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def monotonic(self) -> float:
        """Seconds."""
        return float(len(self.said))

    def ask(self, known_s: float) -> float:
        """What pipelines come to: nothing."""
        self.said.append("pipelines")
        return math.inf


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[Plan, list[str]]]:
    """Plans for devices that are short of memory in so many seconds of a Clock, and what was done."""
    request = Request(Cluster.parse("l4:1x4"), memory_bytes=SHORT_BYTES)
    planner = Planner.of(graph(), {"b": 4 * BATCH}, request)

    def within(limit_s: float) -> tuple[Plan, list[str]]:
        clock = Clock()
        monkeypatch.setattr(timer, "time", clock)
        asked = Request(request.cluster, memory_bytes=SHORT_BYTES, progress=clock.said.append)
        return plan_with(
            planner.anew(asked), Elsewhere(clock.ask), timer.Timer(limit_s), model="stack", graph_hash="0" * 64
        ), clock.said

    return within


def test_everything_is_looked_at_before_anything_is_solved(planned: Callable[[float], tuple[Plan, list[str]]]) -> None:
    """Blocks run again and pipelines too, so that a search that ends early has seen what each of them promises."""
    said = planned(math.inf)[1]
    looks = [number for number, what in enumerate(said) if what.startswith("search on")]
    closer = [number for number, what in enumerate(said) if what.startswith(("honing", "solving"))]
    assert len(looks) > said.count("search on 4") > 1, "devices are short of memory"
    recipes = [number for number, what in enumerate(said) if what.startswith("recipe")]
    assert max(recipes) < said.index("pipelines") < max(looks) < min(closer)


@pytest.mark.slow
def test_all_kinds_of_pipelines_are_looked_at_before_anything_is_solved() -> None:
    said = list[str]()
    request = Request(far("h100:1x4"), time_limit_s=60.0, progress=said.append)
    fastest(SearchContext(graph(8), {"b": 2}, request), model="stack", graph_hash="0" * 64)
    first = {what: next(n for n, each in enumerate(said) if each.startswith(what)) for what in ("search:", "naive:")}
    assert max(first.values()) < next(n for n, each in enumerate(said) if each.startswith(("honing", "solving"))), said


@pytest.mark.slow
def test_more_time_is_never_for_a_worse_plan(planned: Callable[[float], tuple[Plan, list[str]]]) -> None:
    steps_s = [planned(limit_s)[0].predicted.step_s for limit_s in (0.0, 12.0, 14.0, 18.0, 22.0, math.inf)]
    assert all(later_s <= earlier_s * (1 + SIMPLER) for earlier_s, later_s in pairwise(steps_s)), steps_s


def test_what_stages_come_to_is_told_as_soon_as_it_is_known() -> None:
    """A proof begins beside the search then."""
    told = list[float]()
    elsewhere = Elsewhere(lambda known_s: 0.5 * known_s, tell=told.append)
    assert elsewhere.asked(2.0) == elsewhere.asked(1.5) == 1.0 and told == [1.0]


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_where_nothing_was_proven_the_gap_is_to_the_least_work(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its note says. A second process may be quicker than that."""
    monkeypatch.setattr(background_proof, "able", lambda: False)
    request = Request(Cluster.parse("l4:1x2"), Settings(mode), time_limit_s=1e-3)
    context = SearchContext(graph(), {"b": BATCH}, request)
    made = fastest(context, model="stack", graph_hash="0" * 64)
    assert UNPROVEN in made.notes
    assert made.predicted.bound_s == pytest.approx(context.work(1).step_s(2, 1, 1))


def test_what_is_found_in_no_time_at_all_splits_the_work() -> None:
    """It was the baseline, every rank computing everything: the first recipe of the table, behind which time was up."""
    request = Request(Cluster.parse("h100:1x4"), time_limit_s=1e-3)
    made = fastest(SearchContext(graph(), {"b": 4 * BATCH}, request), model="stack", graph_hash="0" * 64)
    tried = {row.name: row.step_s for row in made.alternatives}
    assert made.strategy != "single" and "single" not in tried, (made.strategy, tried)


@pytest.mark.parametrize("glanced", [False, True])
def test_what_is_not_yet_answered_when_time_is_up_gets_the_time_for_an_answer(*, glanced: bool) -> None:
    """The search for plans of one stage found none, and took longer than the whole limit."""
    context = SearchContext(graph(), {"b": 4 * BATCH}, Request(Cluster.parse("h100:1x4"), time_limit_s=60.0))
    walk = Explorer(context, SEARCH, math.inf, math.inf)
    walk.probe(math.inf)
    before = len(walk.found)
    context.timer.ends_at = time.monotonic() - 2 * context.timer.limit_s
    staged(context, [SEARCH], None, {"model": "stack", "graph_hash": "0" * 64}, [walk] if glanced else [])
    assert len(walk.found) == before > 0, "what was looked at is enough where some of it fits"


def test_a_pipeline_that_no_time_was_left_for_is_not_said_to_fit_nowhere() -> None:
    request = Request(Cluster.parse("h100:1x4"), recipe="1f1b", time_limit_s=1e-6)
    with pytest.raises(
        InfeasibleError, match=r"time was up .*; with a longer time limit than 1e-06 s there may be one"
    ):
        fastest(SearchContext(graph(), {"b": 4 * BATCH}, request), model="stack", graph_hash="0" * 64)


@pytest.mark.parametrize("space", FREE, ids=lambda space: space.name)
@pytest.mark.parametrize(
    ("known_s", "left_s", "why"),
    [
        (1e-9, math.inf, "no plan of it is faster than 1 ns"),
        (1.0, -1.0, "time was up before all of it was priced; none yet is faster than 1 s"),
        (math.inf, -1.0, "time was up before all of it was priced"),
    ],
)
def test_a_walk_without_an_answer_says_whether_that_is_for_want_of_time(
    space: Space, known_s: float, left_s: float, why: str
) -> None:
    context = SearchContext(graph(), {"b": 8}, Request(Cluster.parse("h100:1x2")))
    walk = Explorer(context, space, known_s, time.monotonic() + left_s)
    assert walk.run() is None and walk.reason == why
