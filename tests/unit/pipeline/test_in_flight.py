"""Microbatches in flight at every moment, and as few blocks run again as these allow: against the schedule, action by
action, and against every number of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.joint.timetables import SEARCHED, Kind, Timetable, timetable
from autopar.pipeline.filling import Cuts
from autopar.pipeline.in_flight import place_bytes
from autopar.pipeline.orders import orders
from autopar.pipeline.rerun_counts import fitted
from autopar.pipeline.stretches import Cost, Pieces
from tests.helpers.examples import examples

TABLES = [
    timetable(Kind(schedule, virtual), places, microbatches)
    for schedule, virtual, places, microbatches in (
        ("gpipe", 1, 2, 3),
        ("gpipe", 1, 2, 20),
        ("looped_bfs", 2, 2, 3),
        ("1f1b", 1, 3, 4),
        ("interleaved_1f1b", 3, 2, 4),
        ("interleaved_1f1b", 2, 4, 8),
        ("interleaved_zero_bubble", 2, 2, 4),
        ("zbv_zero_bubble", 2, 2, 4),
        ("dualpipev", 2, 2, 5),
    )
]
TABLE = st.sampled_from(TABLES)
BYTES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 3), st.integers(0, 5)), min_size=12, max_size=16
)


def _pieces(numbers: Sequence[tuple[int, int, int, int]]) -> Pieces:
    """Of pieces that keep some bytes, some more between the two parts of a backward, and fewer if they run again, which
    takes a second."""
    costs = [
        Cost(
            micro_s=3.0,
            kept_bytes=float(kept),
            halfway_bytes=float(halfway),
            rest_bytes=float(rest),
            live_bytes=float(live),
        )
        for kept, halfway, rest, live in numbers
    ]
    return Pieces(
        costs,
        [
            Cost(
                micro_s=4.0,
                kept_bytes=min(1.0, c.kept_bytes),
                halfway_bytes=c.halfway_bytes,
                rest_bytes=c.rest_bytes,
                live_bytes=c.live_bytes + 1.0,
            )
            for c in costs
        ],
    )


def _walked(table: Timetable, parts: Sequence[Sequence[Cost]], place: int) -> float:
    """The most bytes of a place, action by action."""
    line = orders(table.kind.schedule, table.places, table.stages, table.microbatches)[place]
    split = {(a.stage, a.microbatch) for a in line if a.kind == "W"}
    kept, halfway, most = (
        [sum(c.kept_bytes for c in part) for part in parts],
        [sum(c.halfway_bytes for c in part) for part in parts],
        0.0,
    )
    now = 0.0
    for kind, stage, microbatch in line:
        first_half = kind == "I" or (kind == "B" and (stage, microbatch) in split)
        now += (
            kept[stage]
            if kind == "F"
            else halfway[stage]
            if first_half
            else -kept[stage] - halfway[stage] * (kind == "W")
        )
        most = max(most, now)
    mine = [c for part, at in zip(parts, table.at, strict=True) if at == place for c in part]
    return most + sum(c.rest_bytes for c in mine) + max(c.live_bytes for c in mine)


def _cut(table: Timetable, count: int, shares: Sequence[float]) -> Cuts:
    """Cut evenly, with such shares of each stage run again."""
    edges = [round(stage * count / table.stages) for stage in range(table.stages + 1)]
    return Cuts(
        edges[1:-1], [round(share * (b - a)) for share, (a, b) in zip(shares, itertools.pairwise(edges), strict=False)]
    )


def _held(table: Timetable, pieces: Pieces, cuts: Cuts) -> list[float]:
    parts = cuts.parts([pieces] * table.stages)
    return [
        place_bytes([part for part, at in zip(parts, table.at, strict=True) if at == place], table.in_flight[place])
        for place in range(table.places)
    ]


def test_all_that_are_searched_are_tested() -> None:
    assert {kind.schedule for kind in SEARCHED} <= {table.kind.schedule for table in TABLES}


@examples(200)
@given(TABLE, BYTES, st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_a_place_is_as_full_as_at_its_fullest_action(
    table: Timetable, numbers: list[tuple[int, int, int, int]], shares: list[float]
) -> None:
    pieces = _pieces(numbers)
    cuts = _cut(table, len(numbers), shares)
    parts = cuts.parts([pieces] * table.stages)
    assert _held(table, pieces, cuts) == pytest.approx([_walked(table, parts, place) for place in range(table.places)])


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_no_moment_is_there_in_vain(table: Timetable) -> None:
    """At none are as many in flight as at another in every stage."""
    for flying in table.in_flight:
        moments = [
            (*kept, *halfway) for kept, halfway in zip(flying.kept.tolist(), flying.halfway.tolist(), strict=True)
        ]
        assert all(
            any(a > b for a, b in zip(one, other, strict=True)) for one, other in itertools.permutations(moments, 2)
        )


@examples(200)
@given(TABLE, BYTES, st.lists(st.floats(0, 1), min_size=8, max_size=8), st.integers(10, 200))
def test_as_few_run_again_as_there_is_room_for(
    table: Timetable, numbers: list[tuple[int, int, int, int]], shares: list[float], limit: int
) -> None:
    """Each place fits wherever it does with all of its pieces run again, and then no stage of it can run one piece less
    again."""
    pieces, limits = _pieces(numbers), [float(limit + 5 * place) for place in range(table.places)]
    cuts = _cut(table, len(numbers), shares)
    made = fitted([pieces] * table.stages, cuts, table.at, table.in_flight, limits)
    edges = [0, *made.bounds, len(numbers)]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    assert made.bounds == cuts.bounds and all(0 <= n <= size for n, size in zip(made.again, sizes, strict=True))
    held, whole = _held(table, pieces, made), _held(table, pieces, Cuts(cuts.bounds, sizes))
    for place, limit_bytes in enumerate(limits):
        assert held[place] <= limit_bytes or whole[place] > limit_bytes
        for stage in (
            stage
            for stage, at in enumerate(table.at)
            if at == place and made.again[stage] and held[place] <= limit_bytes
        ):
            least = made.again[stage] - 1
            freed = pieces.table.freed[edges[stage] :]
            while least and freed[least] >= freed[made.again[stage]]:
                least -= 1
            fewer = _held(
                table, pieces, Cuts(made.bounds, [least if other == stage else n for other, n in enumerate(made.again)])
            )
            assert fewer[place] > limit_bytes


def test_the_stage_with_fewest_in_flight_keeps_its_blocks() -> None:
    """Of two alike stages of the first place of an interleaved schedule the first has up to six microbatches in flight,
    the second four: with room for one block it is kept by the second."""
    table = timetable(Kind("interleaved_1f1b", 2), 2, 8)
    most = table.in_flight[0].kept.max(0).tolist()
    assert most == sorted(most, reverse=True) and most[0] > most[1]
    pieces = Pieces(
        [Cost(micro_s=3.0, kept_bytes=10.0, rest_bytes=1.0)] * 8,
        [Cost(micro_s=4.0, kept_bytes=1.0, rest_bytes=1.0)] * 8,
    )
    all_again = Cuts([2, 4, 6], [2] * 4)
    room = place_bytes([all_again.parts([pieces] * 4)[stage] for stage in (0, 2)], table.in_flight[0])
    made = fitted([pieces] * 4, all_again, table.at, table.in_flight, [room + 9.0 * most[1], room])
    assert made.again == [2, 2, 1, 2]
