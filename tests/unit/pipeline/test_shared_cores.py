"""Places that share cores: the search's times are the event engine's, and bounded by what cores can do."""

from __future__ import annotations

import random

import pytest

from autopar.joint.timetables import SEARCHED, Kind, Timetable
from autopar.pipeline import shared_cores
from autopar.pipeline.makespan import Flow, finishes_s
from autopar.pipeline.orders import StageTime, orders
from autopar.simulate import schedule
from autopar.simulate.engine import run

KINDS = (*(kind for searched in SEARCHED for kind in searched.decided(2, 2, 8)), Kind("naive"))


def drawn(kind: Kind, places: int, send_s: float) -> tuple[Timetable, list[StageTime]]:
    table = Timetable(kind, places, 1 if kind.schedule == "naive" else 3 * places)
    draw, split = random.Random(f"{kind}{places}"), table.schedule.splits_backward
    sizes = [draw.uniform(0.5, 1.5) for _ in range(table.stages)]
    return table, [StageTime(x, x if split else 2 * x, x if split else 0.0, send_s) for x in sizes]


@pytest.mark.parametrize("send_s", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("places", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.schedule}-{kind.virtual}")
def test_the_search_says_what_the_engine_says(kind: Kind, places: int, send_s: float) -> None:
    """A place sends one thing after the other: where sending takes longer than computing, links set the pace."""
    table, times = drawn(kind, places, send_s)
    lines = orders(kind.schedule, places, table.stages, table.microbatches)
    for alone in (1.0, 1.5, 2.0):
        found = max(shared_cores.ends_s(Flow.of(lines, table.at), times, alone))
        sends_s = {(stage, what): send_s for stage in range(table.stages) for what in schedule.SENT}
        tasks, _ = schedule.tasks(lines, table.at, lambda a: times[a.stage].of(a.kind), sends_s, alone)
        assert found == pytest.approx(run(tasks, {schedule.CORES: places / alone}).length_s, rel=1e-6), alone
        if alone == 1.0:
            assert found == pytest.approx(max(finishes_s(lines, times, table.at)), rel=1e-9)
        work_s = sum(times[a.stage].of(a.kind) for line in lines for a in line)
        plain = max(finishes_s(lines, times, table.at))
        assert max(0.0 if send_s else plain / alone, work_s / places) * (1 - 1e-9) <= found <= plain * (1 + 1e-9)


def test_one_place_after_the_other_has_all_cores() -> None:
    table, times = drawn(Kind("naive"), 4, 0.0)
    lines = orders("naive", 4, 4, 1)
    assert max(shared_cores.ends_s(Flow.of(lines, table.at), times, 2.0)) == pytest.approx(
        max(finishes_s(lines, times, table.at)) / 2
    )


def test_sends_take_no_cores() -> None:
    table, times = drawn(Kind("1f1b"), 2, 0.3)
    lines = orders("1f1b", 2, 2, table.microbatches)
    assert max(shared_cores.ends_s(Flow.of(lines, table.at), times, 1.0)) == pytest.approx(
        max(finishes_s(lines, times, table.at)), rel=1e-9
    )
