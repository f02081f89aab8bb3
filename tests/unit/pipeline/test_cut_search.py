"""Shifted cuts against the order that they are timed by: ways timed side by side, cuts that are no slower and fit, and
where that is known the fastest there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.joint.timetables import SEARCHED, Kind, Timetable, timetable
from autopar.pipeline import cut_search
from autopar.pipeline.balance import balance
from autopar.pipeline.cut_search import Shifting
from autopar.pipeline.filling import Cuts
from autopar.pipeline.gathering import Gathering
from autopar.pipeline.in_flight import place_bytes
from autopar.pipeline.makespan import numbers
from autopar.pipeline.orders import StageTime
from autopar.pipeline.rerun_counts import fitted
from autopar.pipeline.stretches import Cost, Pieces
from autopar.pipeline.summing import Summing
from tests.helpers.examples import examples

TABLES = [
    timetable(Kind(schedule, virtual), places, microbatches)
    for schedule, virtual, places, microbatches in (
        ("1f1b", 1, 3, 4),
        ("1f1b", 1, 2, 20),
        ("gpipe", 1, 2, 20),
        ("interleaved_1f1b", 2, 2, 4),
        ("looped_bfs", 2, 2, 3),
        ("interleaved_zero_bubble", 2, 2, 2),
        ("zbv_zero_bubble", 2, 2, 4),
        ("dualpipev", 2, 2, 5),
    )
]
PIECES = st.lists(
    st.builds(
        Cost,
        st.integers(3, 9).map(float),
        st.integers(0, 1).map(float),
        st.integers(0, 5).map(float),
        st.integers(0, 2).map(float),
        st.integers(1, 9).map(float),
        st.integers(0, 3).map(float),
        st.integers(1, 2).map(float),
    ),
    min_size=6,
    max_size=9,
)


SENDS_S = [0.1 * (stop % 3) for stop in range(25)]


def _time(stage: int, part: Sequence[Cost], send_s: float) -> StageTime:
    forward_s, seconds, sums_s = (
        sum(getattr(c, name) for c in part) for name in ("forward_s", "micro_s", "rest_bytes")
    )
    half_s = (seconds - forward_s) / 2
    return StageTime(forward_s, half_s, half_s, send_s, 0.0, Summing(sums_s, sums_s / 2, sums_s / 8, 0.2))


def _step_s(table: Timetable, pieces: Pieces, bounds: Sequence[int], again: Sequence[int]) -> float:
    parts = Cuts([*bounds], [*again]).parts([pieces] * table.stages)
    edges = [0, *bounds, len(pieces.costs)]
    ends = table.ends_s(
        [_time(stage, part, SENDS_S[stop]) for stage, (part, stop) in enumerate(zip(parts, edges[1:], strict=True))]
    )
    return max(
        end + sum(c.once_s for part, at in zip(parts, table.at, strict=True) if at == place for c in part)
        for place, end in enumerate(ends)
    )


def _held(table: Timetable, pieces: Pieces, bounds: Sequence[int], again: Sequence[int]) -> list[float]:
    stages = [*zip(Cuts([*bounds], [*again]).parts([pieces] * table.stages), table.at, strict=True)]
    return [
        place_bytes([part for part, at in stages if at == place], flying)
        for place, flying in enumerate(table.in_flight)
    ]


def _shifted(
    table: Timetable,
    pieces: Pieces,
    cuts: Cuts,
    limits: Sequence[float],
    barred: Collection[int] = (),
    blocks: Collection[int] = (),
) -> Cuts:
    by_stage = [pieces] * table.stages
    return Shifting(
        by_stage, table.in_flight, limits, table.at, barred, blocks, SENDS_S, _time, table.ends_all_s, table.actions
    ).shifted(cuts)


def test_all_that_are_searched_are_tested() -> None:
    assert {table.kind.schedule for table in TABLES} == {kind.schedule for kind in SEARCHED}


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_ways_side_by_side_take_what_each_takes(table: Timetable) -> None:
    drawn = np.random.default_rng(7)
    some = drawn.uniform(size=(2, table.stages)) < 0.7  # stages that send, and that sum gradients

    def time(stage: int) -> StageTime:
        took, (sent, *sums) = drawn.uniform(0.0, 3.0, 3), drawn.uniform(0.0, 1.0, 4) * some[[0, 1, 1, 1], stage]
        return StageTime(
            *took.tolist(),
            float(sent),
            0.0,
            Summing(*map(float, sums), 0.2),
            Gathering(*drawn.uniform(0.0, 2.0, 3).tolist(), 0.1),
        )

    ways = [[time(stage) for stage in range(table.stages)] for _ in range(700)]
    ends = table.ends_all_s(np.array([[*map(numbers, way)] for way in ways]).transpose(2, 1, 0))
    for way in range(0, 700, 70):
        assert ends[:, way] == pytest.approx(table.ends_s(ways[way]), rel=1e-12)


def _drawn(table: Timetable, data: st.DataObject) -> tuple[Pieces, list[int], list[float], Cuts] | None:
    """Pieces, those that no stage begins with, the limits of places and a cut of `balance`; None where nothing fits."""
    costs = data.draw(PIECES)
    pieces = Pieces(
        costs, [Cost(c.micro_s + 1.0, c.once_s, 0.0, 0.0, c.rest_bytes, c.live_bytes + 1.0, c.forward_s) for c in costs]
    )
    barred = sorted(data.draw(st.frozensets(st.integers(1, len(costs) - 1), max_size=1)))
    limits = [data.draw(st.sampled_from([60.0, 100.0, 1e9])) for _ in range(table.places)]
    try:
        cuts = balance([pieces] * table.stages, table.flying, [limits[at] for at in table.at], (), barred, table.at)
    except InfeasibleError:
        return None
    cuts = fitted([pieces] * table.stages, cuts, table.at, table.in_flight, limits)
    fits = all(
        nbytes <= limit for nbytes, limit in zip(_held(table, pieces, cuts.bounds, cuts.again), limits, strict=True)
    )
    return (pieces, barred, limits, cuts) if fits else None


@pytest.mark.parametrize("table", TABLES, ids=str)
@examples(30)
@given(st.data())
def test_of_few_cuts_none_is_faster_that_fits(table: Timetable, data: st.DataObject) -> None:
    """Of those in which nothing runs again, and those in which as little does as memory allows."""
    if (drawn := _drawn(table, data)) is None:
        return
    pieces, barred, limits, cuts = drawn
    made = _shifted(table, pieces, cuts, limits, barred)
    step_s = _step_s(table, pieces, made.bounds, made.again)
    ends = [end for end in range(1, len(pieces.costs)) if end not in barred]
    for bounds in itertools.combinations(ends, table.stages - 1):
        other = fitted([pieces] * table.stages, Cuts([*bounds], [0] * table.stages), table.at, table.in_flight, limits)
        fits = all(
            nbytes <= limit for nbytes, limit in zip(_held(table, pieces, bounds, other.again), limits, strict=True)
        )
        assert not fits or _step_s(table, pieces, bounds, other.again) >= step_s * (1 - 1e-4)


@pytest.mark.parametrize("few", [cut_search.FEW_CUTS, 0])
@pytest.mark.parametrize("table", TABLES, ids=str)
@examples(30)
@given(st.data())
def test_shifted_cuts_are_no_slower_and_fit_and_none_next_to_them_is_faster(
    table: Timetable, few: int, data: st.DataObject
) -> None:
    if (drawn := _drawn(table, data)) is None:
        return
    pieces, barred, limits, cuts = drawn
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cut_search, "FEW_CUTS", few)
        made = _shifted(table, pieces, cuts, limits, barred)
    step_s = _step_s(table, pieces, made.bounds, made.again)
    assert step_s <= _step_s(table, pieces, cuts.bounds, cuts.again) and not set(made.bounds) & set(barred)
    assert all(
        nbytes <= limit for nbytes, limit in zip(_held(table, pieces, made.bounds, made.again), limits, strict=True)
    )
    edges = [0, *made.bounds, len(pieces.costs)]
    for giver, taker in itertools.permutations(range(table.stages), 2):
        moved = [edge - (giver < index <= taker) + (taker < index <= giver) for index, edge in enumerate(edges)]
        again = [min(n, stop - first) for n, (first, stop) in zip(made.again, itertools.pairwise(moved), strict=True)]
        if all(first < stop for first, stop in itertools.pairwise(moved)) and not set(moved) & set(barred):
            fits = all(
                nbytes <= limit for nbytes, limit in zip(_held(table, pieces, moved[1:-1], again), limits, strict=True)
            )
            assert not fits or _step_s(table, pieces, moved[1:-1], again) >= step_s * (1 - 1e-4)
    for one, other in itertools.product(range(table.stages), repeat=2):
        if made.again[one] and table.at[one] == table.at[other]:
            again = [n - (stage == one) + (stage == other != one) for stage, n in enumerate(made.again)]
            fits = all(n <= stop - first for n, (first, stop) in zip(again, itertools.pairwise(edges), strict=True))
            fits &= all(
                nbytes <= limit for nbytes, limit in zip(_held(table, pieces, made.bounds, again), limits, strict=True)
            )
            assert not fits or _step_s(table, pieces, made.bounds, again) >= step_s * (1 - 1e-4)
    ends = {*range(1, len(pieces.costs))} - {*barred, *made.bounds}
    for bound, end in itertools.product(made.bounds, ends):
        if SENDS_S[end] >= SENDS_S[bound]:
            continue
        jumped = sorted({*made.bounds, end} - {bound})
        there = fitted([pieces] * table.stages, Cuts(jumped, [0] * table.stages), table.at, table.in_flight, limits)
        fits = all(
            nbytes <= limit for nbytes, limit in zip(_held(table, pieces, jumped, there.again), limits, strict=True)
        )
        assert not fits or _step_s(table, pieces, jumped, there.again) >= step_s * (1 - 1e-4)


@pytest.mark.parametrize("first", [[3, 7, 13, 18], [1, 2, 3, 4]])
def test_cuts_jump_to_where_little_is_sent(first: list[int]) -> None:
    """Places that run one after the other: what counts is what is sent, four times as much inside of every five pieces
    as between them. To move one piece at a time gains nothing."""
    table = timetable(Kind("naive"), 5, 1)
    pieces = Pieces([Cost(3.0, forward_s=1.0, rest_bytes=1.0)] * 25, [Cost(4.0, forward_s=1.0, rest_bytes=1.0)] * 25)

    sends_s = [4.0 if stop % 5 else 1.0 for stop in range(26)]

    def time_of(stage: int, part: Sequence[Cost], send_s: float) -> StageTime:
        return StageTime(1.0 * len(part), 1.0 * len(part), 1.0 * len(part), send_s)

    assert not cut_search.are_few(25, 5, ())
    made = Shifting(
        [pieces] * 5,
        table.in_flight,
        [math.inf] * 5,
        table.at,
        (),
        (),
        sends_s,
        time_of,
        table.ends_all_s,
        table.actions,
    ).shifted(Cuts(first, [0] * 5))
    assert made.bounds == [5, 10, 15, 20]


def test_a_pipeline_that_is_hardly_ever_full_begins_and_ends_with_short_stages() -> None:
    """As many microbatches as places, 24 blocks alike: the cut is the best of all, and some per cent faster than an
    even one."""
    table = timetable(Kind("interleaved_1f1b", 2), 3, 3)
    pieces = Pieces([Cost(3.0, forward_s=1.0, rest_bytes=1.0)] * 24, [Cost(4.0, forward_s=1.0, rest_bytes=1.0)] * 24)
    even = balance([pieces] * 6, table.flying, [math.inf] * 6, (), (), table.at)
    made = _shifted(table, pieces, even, [math.inf] * 3)
    best_s = min(_step_s(table, pieces, bounds, [0] * 6) for bounds in itertools.combinations(range(1, 24), 5))
    assert _step_s(table, pieces, made.bounds, made.again) == pytest.approx(best_s, rel=0.01)
    assert best_s < _step_s(table, pieces, even.bounds, even.again) * 0.97
    sizes = [stop - first for first, stop in itertools.pairwise([0, *made.bounds, 24])]
    assert sizes[0] + sizes[-1] < 8


def test_a_stage_that_has_blocks_keeps_one() -> None:
    """Two pieces in front of the blocks, on a place that is so slow that it had better have nothing else."""
    table = timetable(Kind("1f1b"), 2, 4)
    fast, slow = (
        Pieces(
            [Cost(3.0 * pace, forward_s=pace, rest_bytes=1.0)] * 10,
            [Cost(4.0 * pace, forward_s=pace, rest_bytes=1.0)] * 10,
        )
        for pace in (1.0, 50.0)
    )
    for blocks, sizes in (((), 1), (range(2, 10), 3)):
        made = Shifting(
            [slow, fast],
            table.in_flight,
            [math.inf] * 2,
            table.at,
            (),
            blocks,
            SENDS_S,
            _time,
            table.ends_all_s,
            table.actions,
        ).shifted(Cuts([5], [0, 0]))
        assert made.bounds == [sizes]
