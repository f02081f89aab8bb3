"""The least length of a schedule against the schedule itself, for stages of any lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.joint.timetables import SEARCHED, Kind, Timetable, flow_of
from autopar.pipeline.gathering import Gathering
from autopar.pipeline.makespan_bound import Example, Least, least, mean
from autopar.pipeline.orders import StageTime
from autopar.pipeline.summing import Summing
from tests.helpers.examples import examples

SECONDS = st.one_of(st.just(0.0), st.floats(0.01, 10.0))
SHAPES = {
    Kind("1f1b"): (3, 4),
    Kind("gpipe"): (3, 4),
    Kind("interleaved_1f1b", 2): (2, 4),
    Kind("interleaved_1f1b", 4): (2, 2),
    Kind("looped_bfs", 2): (2, 3),
    Kind("interleaved_zero_bubble", 2): (3, 3),
    Kind("zbv_zero_bubble", 2): (3, 5),
    Kind("dualpipev", 2): (2, 5),
}
EXAMPLES = (
    Example(1.0, 2.0, 0.9, 0.06, 2.0),
    Example(1.0, 2.0, 0.0, 3.0),
    Example(1.0, 1.0, 1.0, 0.0),
    Example(1.0, 2.0, 0.9, 0.0, 9.0),
)
SHARE = 0.2


def _weights(kind: Kind, examples: tuple[Example, ...], sends_s: tuple[float, ...] = ()) -> Least:
    places, microbatches = SHAPES[kind]
    return least(
        flow_of(kind, places, microbatches),
        Timetable(kind, places, microbatches).stages,
        microbatches,
        examples,
        sends_s,
        SHARE,
    )


@pytest.mark.parametrize("kind", SHAPES)
@examples(40)
@given(st.data())
def test_no_stages_are_faster(kind: Kind, data: st.DataObject) -> None:
    places, microbatches = SHAPES[kind]
    table = Timetable(kind, places, microbatches)
    sends = data.draw(st.lists(SECONDS, min_size=table.stages - 1, max_size=table.stages - 1))
    examples = data.draw(st.lists(st.sampled_from(EXAMPLES), min_size=1, max_size=3))
    weights = _weights(kind, (*examples,), tuple(sends))
    draw = data.draw(st.lists(st.tuples(*[SECONDS] * 5), min_size=table.stages, max_size=table.stages))
    once = data.draw(st.lists(SECONDS, min_size=places, max_size=places))
    longer = data.draw(st.sampled_from([0.0, 0.5]))  # sends may take longer than they do at least
    times = []
    for (forward, inputs, late, both, sums), sent in zip(draw, [*sends, 0.0], strict=True):
        left = max(sums / 4, sums - (both or inputs + late))
        summing = Summing(sums, left, 0.1 * sums, SHARE)
        leaves = Gathering(0.2 * longer, longer * sums, forward / 2, SHARE)  # which may cost nothing
        times.append(StageTime(forward, inputs, late, sent + longer, both, summing, leaves))
    whole = sum(min(time.inputs_s + time.weights_s, time.of("B")) for time in times)
    compute = sum(min(time.inputs_s, time.of("B")) for time in times)
    took = max(end + late for end, late in zip(table.ends_s(times, whole=True), once, strict=True))
    summed = sum(time.summing.whole_s for time in times)
    least_s = weights.step_s(Example(sum(t.forward_s for t in times), whole, compute, sum(once), summed))
    assert least_s <= took * (1 + 1e-9)


def test_all_that_are_searched_are_tested() -> None:
    assert {kind.schedule for kind in SHAPES} == {kind.schedule for kind in SEARCHED}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_bubble_is_seen(kind: Kind) -> None:
    """More is proven than every place's share, and no more than the step of even stages."""
    places, microbatches = SHAPES[kind]
    weights = _weights(kind, EXAMPLES[:1])
    table = Timetable(kind, places, microbatches)
    third, split = 1 / table.stages, table.schedule.splits_backward
    even = StageTime(third, third, third, 0.0, 2 * third) if split else StageTime(third, 2 * third)
    sums_s = EXAMPLES[0].sums_s / table.stages
    even = replace(even, summing=Summing(sums_s, max(sums_s / 4, sums_s - even.of("B")), 0.0, SHARE))
    length = max(table.ends_s([even] * table.stages, whole=True)) + EXAMPLES[0].once_s / places
    assert mean(places, microbatches).step_s(EXAMPLES[0]) < weights.step_s(EXAMPLES[0]) <= length * (1 + 1e-9)


def test_sums_that_nothing_overlaps_are_seen() -> None:
    """One stage on each place, whose sums take longer than all else: 20 s on some place, begun in its last
    backward. Before that come four forwards of the model on it and the places before it, and three backwards."""
    example = Example(1.0, 2.0, 0.0, 0.0, 60.0)
    even = StageTime(1 / 3, 2 / 3, summing=Summing(20.0, 20.0 - 2 / 3, 0.0, SHARE))
    took_s = max(Timetable(Kind("1f1b"), *SHAPES[Kind("1f1b")]).ends_s([even] * 3, whole=True))
    assert 24.0 < _weights(Kind("1f1b"), (example,)).step_s(example) < took_s


def test_one_stage_on_each_place_waits_for_the_first_and_the_last() -> None:
    weights = _weights(Kind("1f1b"), (Example(1.0, 2.0, 0.0, 0.0),))
    assert weights.step_s(Example(1.0, 2.0, 0.0, 0.0)) == pytest.approx(3 * (3 + 4 - 1) / 3, rel=1e-4)


def test_a_microbatch_waits_for_its_sends() -> None:
    """Three places: the first microbatch is sent twice before the last place begins, the last one twice back before the
    first one ends; and some in between are waited for, too."""
    example, sends = Example(1.0, 2.0, 0.0, 0.0), (0.01, 0.02)
    plain_s, sent_s = (_weights(Kind("1f1b"), (example,), sent).step_s(example) for sent in ((), sends))
    even = [StageTime(1 / 3, 2 / 3, send_s=sent) for sent in (*sends, 0.0)]
    took_s = max(Timetable(Kind("1f1b"), *SHAPES[Kind("1f1b")]).ends_s(even, whole=True))
    assert plain_s + 2 * sum(sends) <= sent_s * (1 + 1e-5) <= took_s * (1 + 1e-4)


@pytest.mark.parametrize("kind", SHAPES)
def test_weights_of_several_examples_say_most_of_the_one_that_takes_least(kind: Kind) -> None:
    """One keeps its forward short, one its backward: the weights of either say little of the other."""
    examples = Example(0.5, 2.5, 1.0, 0.0, 1.0), Example(1.6, 1.3, 0.6, 0.0, 0.2)
    least_s = [
        min(map(weights.step_s, examples))
        for weights in (_weights(kind, examples), *(_weights(kind, (e,)) for e in examples))
    ]
    assert least_s[0] >= max(least_s[1:]) * (1 - 1e-5)
