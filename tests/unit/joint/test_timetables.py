"""Timetables: what is told from two short steps is what the whole step comes to, within half a percent."""

from __future__ import annotations

import random

import pytest

from autopar.joint.timetables import SEARCHED, Kind, Timetable
from autopar.pipeline.flow import finishes_s
from autopar.pipeline.orders import StageTime, in_flight, orders


@pytest.mark.parametrize("places", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", SEARCHED, ids=lambda kind: f"{kind.schedule}-{kind.virtual}")
def test_a_long_step_is_told_from_short_ones(kind: Kind, places: int) -> None:
    table = Timetable(kind, places, 16 * places)
    assert len(table.short) == 2
    draw = random.Random(f"{kind}{places}")
    sizes = [draw.uniform(0.85, 1.15) for _ in range(table.stages)]
    times = [StageTime(x / 3, x / 3 if table.schedule.splits_backward else 2 * x / 3, x / 3 if table.schedule.splits_backward else 0.0, 0.02)
             for x in sizes]
    lines = orders(kind.schedule, places, table.stages, table.microbatches)
    assert table.ends_s(times) == pytest.approx(finishes_s(lines, times, table.at), rel=5e-3)
    assert table.ends_s(times, whole=True) == finishes_s(lines, times, table.at)
    assert table.flying == in_flight(lines, table.stages)


def test_even_stages_wait_as_the_formula_of_1f1b_says() -> None:
    """(m + p - 1) / p of the work of one microbatch: Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2."""
    table = Timetable(Kind("1f1b"), 4, 32)
    assert table.length == pytest.approx((32 + 3) / 4)
    assert table.kept == 1.0 and table.flying == [4, 3, 2, 1]
