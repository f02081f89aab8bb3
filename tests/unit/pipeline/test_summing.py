"""When sums of gradients begin in a pipeline, and how much longer its places take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.joint.timetables import Kind, Timetable, timetable
from autopar.pipeline.once_per_step import Sums
from autopar.pipeline.orders import StageTime
from autopar.pipeline.summing import NOTHING, Summing

AXIS = Cluster.parse("h100:1x4").mesh((4,)).axes[0]
FULL_BYTES = 25e6


def _of(buckets: float, backward_s: float, beside_s: float = 0.0, contention: float = 0.1) -> Summing:
    """A stage with gradients for so many buckets, each of which takes a second, and a tenth for copies."""
    sums = Sums("all", (FULL_BYTES,) * int(buckets), FULL_BYTES, (("all_reduce", AXIS, buckets),))
    return Summing.of([sums], buckets, buckets / 10, backward_s, beside_s, contention)


def test_the_last_backward_overlaps_all_but_the_last_bucket() -> None:
    assert _of(8, 100.0) == Summing(8.0, 1.0, 0.8, 0.1)


def test_what_the_last_backward_is_too_short_for_is_left() -> None:
    """Its first eighth fills a bucket."""
    assert _of(8, 4.0) == Summing(8.0, 8.0 - 3.5, 0.8, 0.1)


def test_nothing_overlaps_on_a_device_that_cannot() -> None:
    assert _of(8, 100.0, contention=1.0) == Summing(late_s=8.0)


@pytest.mark.parametrize(("beside_s", "left_s"), [(0.5, 1.0), (3.0, 3.0), (9.0, 8.0)])
def test_what_makes_the_last_backward_longer_is_left(beside_s: float, left_s: float) -> None:
    assert _of(8, 100.0, beside_s).left_s == left_s


def test_one_bucket_begins_when_the_backward_is_done() -> None:
    assert _of(1, 100.0).left_s == _of(1, 100.0).whole_s == 1.0


def test_a_stage_without_sums_has_none() -> None:
    assert Summing.of([], 0.0, 0.0, 1.0, 0.0, 0.1) == NOTHING


@given(st.integers(1, 50), st.floats(0.0, 60.0))
def test_sums_begin_no_earlier_than_the_last_backward(buckets: int, backward_s: float) -> None:
    """Bounds are of that (makespan_bound)."""
    made = _of(buckets, backward_s)
    assert max(0.0, made.whole_s - backward_s) * (1 - 1e-9) <= made.left_s <= made.whole_s


EVEN, SUMS = StageTime(1.0, 2.0), Summing(3.0, 2.0, 0.2, 0.1)
TABLE = timetable(Kind("interleaved_1f1b", 2), 2, 4)


def _longer(stage: int, times: Sequence[StageTime] = (EVEN,) * 4, table: Timetable = TABLE) -> float:
    """Seconds by which the place of a stage takes longer with its sums; the other place does not."""
    here = [replace(time, summing=SUMS if i == stage else NOTHING) for i, time in enumerate(times)]
    place, (before, after) = table.at[stage], (table.ends_s(each) for each in (times, here))
    assert after[1 - place] == before[1 - place]
    return after[place] - before[place]


def test_the_first_stage_begins_them_in_its_last_backward() -> None:
    """Of three seconds two come after it, which takes a tenth of the others longer."""
    assert _longer(0) == pytest.approx(0.1 + 2.0)


def test_the_last_stage_of_another_place_begins_them_behind_it() -> None:
    assert _longer(1) == pytest.approx(3.0)


def test_other_stages_of_its_place_overlap_them() -> None:
    """After the last backward of stage 2 its place has two of stage 0, of two seconds each. They take a tenth of the
    three seconds longer, and copies come last."""
    assert _longer(2) == pytest.approx(0.3 + 0.2)


def test_sums_of_one_place_run_one_after_the_other() -> None:
    long = Summing(20.0, 18.0, 0.5, 0.1)
    first, second = (
        max(TABLE.ends_s([replace(EVEN, summing=long if stage in mine else NOTHING) for stage in range(4)]))
        for mine in ([2], [0, 2])
    )
    assert second == pytest.approx(first + 20.0)


def test_after_a_split_backward_all_is_left() -> None:
    table, split = timetable(Kind("interleaved_zero_bubble", 2), 2, 4), StageTime(1.0, 1.0, 1.0)
    assert _longer(0, (split,) * 4, table) == pytest.approx(3.0)
