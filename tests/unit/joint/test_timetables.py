"""Timetables: what is told from two short steps is what the whole step comes to, within half a percent."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.joint.timetables import SEARCHED, WORTH_GAIN, Kind, Timetable
from autopar.pipeline.makespan import finishes_s
from autopar.pipeline.orders import StageTime, in_flight, orders
from autopar.pipeline.schedules import SCHEDULES


@pytest.mark.parametrize("places", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "kind",
    [kind for searched in SEARCHED for kind in searched.decided(4, 4, 32)],
    ids=lambda kind: f"{kind.schedule}-{kind.virtual}",
)
def test_a_long_step_is_told_from_short_ones(kind: Kind, places: int) -> None:
    table = Timetable(kind, places, 16 * places)
    assert len(table.short) == 2
    draw = random.Random(f"{kind}{places}")
    sizes = [draw.uniform(0.85, 1.15) for _ in range(table.stages)]
    times = [
        StageTime(
            x / 3,
            x / 3 if table.schedule.splits_backward else 2 * x / 3,
            x / 3 if table.schedule.splits_backward else 0.0,
            0.02,
        )
        for x in sizes
    ]
    lines = orders(kind.schedule, places, table.stages, table.microbatches)
    assert table.ends_s(times) == pytest.approx(finishes_s(lines, times, table.at), rel=5e-3)
    assert table.ends_s(times, whole=True) == finishes_s(lines, times, table.at)
    assert table.flying == in_flight(lines, table.stages)


def test_every_schedule_of_several_microbatches_is_searched() -> None:
    """Recipes have no other ones: what is proven of all plans is proven of theirs."""
    assert {kind.schedule for kind in SEARCHED} == {*SCHEDULES} - {"naive"}


@pytest.mark.parametrize(("kind", "slower"), [("gpipe", "1f1b"), ("looped_bfs", "interleaved_1f1b")])
def test_where_all_forwards_run_first_sends_are_waited_for_once(kind: str, slower: str) -> None:
    """With free sends both take as long; with sends of a fifth of a stage the other one is slower."""
    virtual = SCHEDULES[kind].virtual or 2
    for send_s, least in ((0.0, 1.0), (0.2, 1.04)):
        first_s, second_s = (
            max(table.ends_s([StageTime(1 / 3, 2 / 3, send_s=send_s)] * table.stages, whole=True))
            for table in (Timetable(Kind(name, virtual), 4, 16) for name in (kind, slower))
        )
        assert second_s >= first_s * least * (1 - 1e-9) and (send_s or second_s == pytest.approx(first_s))


@given(
    st.sampled_from([Kind("1f1b"), Kind("interleaved_1f1b", 2), Kind("interleaved_1f1b", 3)]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.data(),
)
def test_uneven_stages_are_hardly_faster(kind: Kind, places: int, rounds: int, data: st.DataObject) -> None:
    """What the search takes for the step of a timetable that it has not laid out is nearly right: no stages of as much
    work are faster by more than a tenth."""
    table = Timetable(kind, places, places * rounds)
    sizes = data.draw(st.lists(st.floats(0.1, 1.0), min_size=table.stages, max_size=table.stages))
    assert max(table.ends_s([StageTime(x / 3, 2 * x / 3) for x in sizes], whole=True)) >= 0.9 * table.length * sum(
        sizes
    )


def test_even_stages_wait_as_the_formula_of_1f1b_says() -> None:
    """(m + p - 1) / p of the work of one microbatch: Narayanan et al., https://arxiv.org/abs/2104.04473, section
    2.2."""
    table = Timetable(Kind("1f1b"), 4, 32)
    assert table.length == pytest.approx((32 + 3) / 4)
    assert table.kept == 1.0 and table.flying == [(4, 0), (3, 0), (2, 0), (1, 0)]


OPEN = [kind for kind in SEARCHED if kind.virtual is None]


@pytest.mark.parametrize("kind", OPEN, ids=lambda kind: kind.schedule)
@given(st.integers(2, 6), st.integers(1, 8), st.integers(2, 40))
def test_each_number_of_stages_is_worth_it(kind: Kind, places: int, rounds: int, pieces: int) -> None:
    """Each spreads pieces more evenly than fewer stages do, or is the least there is, and makes a step of even stages
    shorter by so much."""
    found = [each.virtual or 0 for each in kind.decided(places, places * rounds, pieces)]
    lengths = [
        Timetable(each, places, places * rounds).length for each in kind.decided(places, places * rounds, pieces)
    ]
    assert found[0] == 2 and found == sorted(set(found))
    assert all(after <= before * (1 - WORTH_GAIN) * (1 + 1e-9) for before, after in itertools.pairwise(lengths))
    most = [-(-pieces // (places * virtual)) for virtual in found]
    assert most == sorted(set(most), reverse=True) or most[0] == 1


@pytest.mark.parametrize("kind", OPEN, ids=lambda kind: kind.schedule)
def test_blocks_that_are_a_stage_each_are_tried(kind: Kind) -> None:
    """Llama-3 405B has 126 blocks and was trained with 16 places of 8 stages, https://arxiv.org/abs/2407.21783, section
    3.3.2: an even share of its embedding and head is left to two more."""
    assert Kind(kind.schedule, 8) in kind.decided(16, 16, 126)
    assert [*Kind("1f1b").decided(16, 16, 126)] == [Kind("1f1b")]
    # where the pipeline is always full there is nothing to wait for
    assert [each.virtual for each in kind.decided(4, 1024, 126)] == [2]


@pytest.mark.parametrize(
    ("kind", "places", "microbatches", "waits"),
    [
        (Kind("gpipe"), 4, 16, 6),  # the first microbatch waits up, the last one back down
        (Kind("gpipe"), 2, 2, 2),
        (Kind("interleaved_1f1b", 4), 16, 16, 126),  # all of one microbatch: as many as there are hops, twice
    ],
)
def test_a_step_waits_for_these_sends(kind: Kind, places: int, microbatches: int, waits: int) -> None:
    assert Timetable(kind, places, microbatches).waits == pytest.approx(waits)


@pytest.mark.parametrize("kind", [Kind("1f1b"), Kind("interleaved_1f1b", 3), Kind("zbv_zero_bubble", 2)])
@pytest.mark.parametrize("places", [2, 4])
def test_no_step_waits_for_fewer_sends_than_one_microbatch_or_for_more_than_one_after_the_other(
    kind: Kind, places: int
) -> None:
    table = Timetable(kind, places, 2 * places)
    hops = sum(one != other for one, other in itertools.pairwise(table.at))
    assert places - 1 <= table.waits <= 2 * hops * table.microbatches
