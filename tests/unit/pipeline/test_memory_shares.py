"""The memory of a place that several stages share, and cuts into several stages per place against all cuts there
are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.joint.timetables import Kind, Timetable
from autopar.pipeline.balance import balance
from autopar.pipeline.filling import Cuts
from autopar.pipeline.memory_shares import Budgets, Need, Spent, rooms, split
from autopar.pipeline.stretches import Cost, Pieces, memory_bytes

NEEDS = st.lists(
    st.builds(
        lambda held, share, live, more: Need(held, share * held, live, live + more),
        st.floats(0, 100),
        st.floats(0, 1),
        st.floats(0, 9),
        st.floats(0, 9),
    ),
    min_size=1,
    max_size=4,
)
KINDS = st.sampled_from([Kind("interleaved_1f1b", 2), Kind("interleaved_1f1b", 3), Kind("zbv_zero_bubble", 2)])
COSTS = st.lists(
    st.builds(
        Cost,
        st.integers(1, 9).map(float),
        st.just(0.0),
        st.integers(0, 5).map(float),
        st.integers(0, 2).map(float),
        st.integers(0, 9).map(float),
        st.integers(0, 3).map(float),
    ),
    min_size=6,
    max_size=9,
)


@given(NEEDS, st.floats(1, 400))
def test_stages_share_all_there_is(needs: list[Need], limit_bytes: float) -> None:
    """Beside what is there only while one of them runs, all of the memory is some stage's."""
    assert sum(split(needs, limit_bytes).shares) == pytest.approx(1.0)
    each = rooms(needs, limit_bytes)
    if len(each) > 1:
        assert sum(nbytes - spare for nbytes, spare in each) == pytest.approx(max(0.0, limit_bytes - each[0][1]))


@given(NEEDS, st.floats(1, 400))
def test_a_stage_has_room_for_what_it_takes_where_all_have(needs: list[Need], limit_bytes: float) -> None:
    """Without anything run again where that fits, and else where all is run again if that does."""
    held, live = sum(need.held for need in needs), max(need.live for need in needs)
    least, most = held - sum(need.freed for need in needs), max(live, *(need.live_again for need in needs))
    for need, (nbytes, _) in zip(needs, rooms(needs, limit_bytes), strict=True):
        if held + live <= limit_bytes:
            assert need.held + need.live <= nbytes * (1 + 1e-9)
        elif least + most <= limit_bytes:
            assert need.held - need.freed + max(need.live, need.live_again) <= nbytes * (1 + 1e-9) + 1e-9


def test_what_a_stage_leaves_is_for_the_next_one_of_its_place() -> None:
    """Two places with two stages each: of 10 s per stage and 40 bytes the first has taken 8 s and 5 bytes."""
    budgets = Budgets((0, 1, 0, 1), (44.0, 44.0, 44.0, 44.0), [Need(80.0, 0.0, 4.0, 4.0)] * 4)
    assert budgets.of(0, 10.0, []) == pytest.approx((10.0, 24.0, 4.0))
    spent = [Spent(8.0, 5.0, 4.0), Spent(10.0, 20.0, 4.0)]
    assert budgets.of(2, 10.0, spent) == pytest.approx((12.0, 39.0, 4.0))
    assert budgets.of(3, 10.0, [*spent, Spent(12.0, 35.0, 4.0)]) == pytest.approx((10.0, 24.0, 4.0))


def _places_bytes(table: Timetable, cuts: Cuts, pieces: Pieces) -> list[float]:
    stages = [*zip(cuts.parts([pieces] * table.stages), table.flying, table.at, strict=True)]
    return [memory_bytes(*((part, n) for part, n, at in stages if at == place)) for place in range(table.places)]


def _seconds(table: Timetable, parts: Sequence[Sequence[Cost]]) -> tuple[float, float]:
    """Of the slowest stage, and of the slowest place."""
    each = [sum(c.micro_s for c in part) for part in parts]
    return max(each), max(
        sum(s for s, at in zip(each, table.at, strict=True) if at == place) for place in range(table.places)
    )


MOVED = [
    Cost(micro, 0.0, kept, halfway, rest, live)
    for micro, kept, halfway, rest, live in (
        (7.0, 1.0, 0.0, 1.0, 1.0),
        (1.0, 3.0, 2.0, 4.0, 1.0),
        (4.0, 3.0, 1.0, 9.0, 3.0),
        (1.0, 5.0, 0.0, 9.0, 0.0),
        (6.0, 3.0, 2.0, 0.0, 3.0),
        (1.0, 3.0, 0.0, 2.0, 0.0),
    )
]


@given(
    KINDS,
    COSTS,
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=9, max_size=9),
    st.integers(20, 200),
    st.booleans(),
)
# a stage that is moved for one behind it holds more there than before
@example(
    Kind("zbv_zero_bubble", 2), MOVED, [(3, 0, 1), (1, 1, 2), (1, 3, 0), (3, 1, 2), (3, 2, 1), (2, 3, 1)], 28, False
)
@example(
    Kind("zbv_zero_bubble", 2), MOVED, [(3, 0, 1), (1, 1, 2), (1, 3, 0), (3, 1, 2), (3, 2, 1), (2, 3, 1)], 28, True
)
def test_no_place_has_more_than_its_memory(
    kind: Kind, costs: list[Cost], more: list[tuple[int, int, int]], limit: int, by_place: bool
) -> None:
    table = Timetable(kind, 2, 4)
    again = [
        replace(c, micro_s=c.micro_s + s, kept_bytes=max(0.0, c.kept_bytes - k), live_bytes=c.live_bytes + n)
        for c, (s, k, n) in zip(costs, more, strict=False)
    ]
    pieces = Pieces(costs, again)
    try:
        found = balance(
            [pieces] * table.stages, table.flying, [float(limit)] * table.stages, at=table.at, by_place=by_place
        )
    except InfeasibleError:
        return
    assert max(_places_bytes(table, found, pieces)) <= limit * (1 + 1e-9)
    if (
        max(_places_bytes(table, Cuts(found.bounds, [0] * table.stages), pieces)) <= 0.5 * limit
        and len({c.live_bytes for c in costs}) == 1
    ):
        assert not any(found.again)  # nothing is run again where half of the memory is enough


@given(KINDS, COSTS)
def test_the_slowest_stage_is_or_place_is_as_fast_as_any_cut_allows(kind: Kind, costs: list[Cost]) -> None:
    """With all the memory there is: of the slowest stage exactly, of the slowest place within a piece of the best of
    all cuts."""
    table = Timetable(kind, 2, 4)
    assume(len(costs) >= table.stages)
    pieces = [Pieces(costs, costs)] * table.stages
    every = [
        _seconds(table, Cuts(list(bounds), [0] * table.stages).parts(pieces))
        for bounds in itertools.combinations(range(1, len(costs)), table.stages - 1)
    ]
    one, other = (
        balance(pieces, table.flying, [math.inf] * table.stages, at=table.at, by_place=by_place).parts(pieces)
        for by_place in (False, True)
    )
    assert _seconds(table, one)[0] == pytest.approx(min(stage_s for stage_s, _ in every))
    assert _seconds(table, other)[1] <= min(place_s for _, place_s in every) + max(c.micro_s for c in costs)


@given(KINDS, COSTS, st.frozensets(st.integers(0, 8), min_size=2, max_size=5), st.booleans())
# evenly cut, the second place has the third and fourth
@example(
    Kind("zbv_zero_bubble", 2),
    [Cost(9.0), Cost(1.0), Cost(1.0), Cost(1.0), Cost(1.0), Cost(9.0)],
    frozenset({0, 1, 5}),
    False,
)
def test_each_place_has_a_piece_with_parameters_where_its_first_or_last_stage_can(
    kind: Kind, costs: list[Cost], some: frozenset[int], by_place: bool
) -> None:
    table = Timetable(kind, 2, 4)
    assume(len(costs) >= table.stages)
    needed, pieces = sorted(piece for piece in some if piece < len(costs)), [Pieces(costs, costs)] * table.stages

    def have(bounds: Sequence[int]) -> list[bool]:
        return [any(a <= piece < b for piece in needed) for a, b in itertools.pairwise((0, *bounds, len(costs)))]

    cuts = [
        bounds
        for bounds in itertools.combinations(range(1, len(costs)), table.stages - 1)
        if all(have(bounds)[:2]) or all(have(bounds)[-2:])
    ]
    found = balance(pieces, table.flying, [math.inf] * table.stages, at=table.at, needed=needed, by_place=by_place)
    if cuts:
        assert {place for place, filled in zip(table.at, have(found.bounds), strict=True) if filled} == {0, 1}
    if cuts and not by_place:
        each = [_seconds(table, Cuts(list(bounds), [0] * table.stages).parts(pieces))[0] for bounds in cuts]
        assert _seconds(table, found.parts(pieces))[0] <= min(each) * (1 + 1e-6)


@given(KINDS, st.integers(2, 3), st.integers(6, 40))
def test_alike_pieces_are_spread_evenly_over_places(kind: Kind, places: int, count: int) -> None:
    table = Timetable(kind, places, 2 * places)
    assume(count >= table.stages)
    costs = [Cost(1.0, rest_bytes=1.0)] * count
    pieces = [Pieces(costs, costs)] * table.stages
    found = balance(pieces, table.flying, [math.inf] * table.stages, at=table.at, by_place=True)
    assert _seconds(table, found.parts(pieces))[1] == math.ceil(count / places)
