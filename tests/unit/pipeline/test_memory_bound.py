"""The least seconds of a step with the memory of each place, against steps that fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.joint.timetables import Kind, Timetable, flow_of
from autopar.pipeline.memory_bound import Part, Step, Whole
from autopar.pipeline.orders import StageTime
from tests.unit.pipeline.test_makespan_bound import SHAPES

WAYS = (0.0, 10.0), (0.3, 6.0), (1.0, 1.0)
BLOCKS = Part(1.0, 2.0, 0.9, 0.0, 2.0, WAYS)
"""Of one block; without T, which depends on the number of microbatches."""


def _whole(count: int, microbatches: int, once_s: float) -> list[Part]:
    """A run of `count` such blocks, and an operator outside of blocks."""
    ways = [(seconds * count, nbytes * count) for seconds, nbytes in WAYS]
    run_s = count * (3.0 * microbatches + once_s)
    return [
        Part(0.1, 0.2, 0.0, 0.3 * microbatches, 0.5, [(0.0, 1.0)]),
        Part(1.0 * count, 2.0 * count, 0.9 * count, run_s, 2.0 * count, ways),
    ]


LEFT = 0.4
"""Seconds of a pass that a block may leave to the next one at most."""


def _left_to_each_other(count: int, microbatches: int, once_s: float) -> list[tuple[float, float]]:
    """Part.chain_s of such blocks, which take 0.2 and 0.3 more in each pass, wherever that is."""
    run_s = count * (3.5 * microbatches + once_s)
    return [(1.2 * count, LEFT), (2.3 * count, LEFT), (run_s, 2.0 * LEFT * microbatches)]


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_no_stages_that_fit_are_faster(kind: Kind, data: st.DataObject) -> None:
    """Any numbers of blocks in each stage, each of which runs again in some way, with as much memory as they take, and
    leaves some of its work to the next stage. In cases of whole pieces the operator outside of blocks is the last
    piece."""
    places, microbatches = SHAPES[kind]
    table = Timetable(kind, places, microbatches)
    counts = data.draw(st.lists(st.integers(0, 2), min_size=table.stages, max_size=table.stages))
    counts[0] += not any(counts)
    in_order = data.draw(st.booleans())
    counts = [max(1, n) for n in counts[:-1]] + counts[-1:] if in_order else counts
    ways = [data.draw(st.lists(st.sampled_from(WAYS), min_size=n, max_size=n)) for n in counts]
    head = table.stages - 1 if in_order else data.draw(st.integers(0, table.stages - 1))
    chained, some = data.draw(st.booleans()), st.sampled_from([0.0, LEFT])
    left = data.draw(st.lists(some, min_size=table.stages + 1, max_size=table.stages + 1))
    once_s, send_s, slower = (data.draw(st.sampled_from(each)) for each in ([0.0, 0.7], [0.0, 0.2], [1.0, 1.5]))
    times, kept, rest = [], [], []
    for stage, (n, own) in enumerate(zip(counts, ways, strict=True)):
        here = float(stage == head)
        forward, again = n + 0.1 * here, sum(seconds for seconds, _ in own)
        inputs, late = 0.9 * n + again, 1.1 * n + 0.2 * here
        if chained:
            passed = left[stage] - left[stage + 1]
            forward, late = forward + max(0.0, 0.2 * n + passed), late + max(0.0, 0.3 * n + passed)
        times.append(StageTime(forward * slower, inputs * slower, late * slower, send_s))
        kept.append(sum(nbytes for _, nbytes in own) + here)
        rest.append(2.0 * n + 0.5 * here)
    limit = 0.0
    for place, flying in enumerate(table.in_flight):
        mine = table.of_place(place, kept)
        held = max(sum(n * b for n, b in zip(moment, mine, strict=True)) for moment in flying.kept)
        limit = max(limit, held + sum(table.of_place(place, rest)))
    once = [once_s * sum(table.of_place(place, counts)) for place in range(places)]
    took = max(end + late for end, late in zip(table.ends_s(times, whole=True), once, strict=True))
    parts = _whole(sum(counts), microbatches, once_s)
    if chained:
        parts[1] = replace(parts[1], chain_s=_left_to_each_other(sum(counts), microbatches, once_s))
    flow, sends = flow_of(kind, places, microbatches), [send_s] * (table.stages - 1)
    step, whole = Step(table.at, microbatches, table.in_flight, limit, flow, sends), None
    if in_order:
        parts = [replace(parts[0], first=sum(counts), count=1), replace(parts[1], count=sum(counts))]
        whole = Whole(1, max(sum(table.of_place(place, counts)) for place in range(places)), 0, head)
    least_s = step.least_s(parts, whole)
    assert least_s <= took * (1 + 1e-9)
    assert least_s >= step.least_s(parts) * (1 - 1e-6)


def test_each_place_has_its_own_memory() -> None:
    """The first of two places keeps two microbatches and the last one: what fits in the mean may not fit there."""
    kind = Kind("1f1b")
    table, parts = Timetable(kind, 2, 8), _whole(8, 8, 0.0)

    def least_s(limit_bytes: float) -> float:
        return Step(table.at, 8, table.in_flight, limit_bytes, flow_of(kind, 2, 8)).least_s(parts)

    roomy_s, short_s = least_s(160.0), least_s(50.0)
    assert roomy_s * 1.05 < short_s < least_s(40.0) < least_s(14.0) == math.inf


def test_places_have_whole_blocks() -> None:
    """Four blocks on two places, and as much as three of them outside of blocks, behind them: it may be halved where
    nothing is said of pieces."""
    kind = Kind("1f1b")
    table = Timetable(kind, 2, 16)
    blocks, head = replace(_whole(4, 16, 0.0)[1], count=4), Part(3.0, 6.0, 0.0, 144.0, first=4, count=1)
    step = Step(table.at, 16, table.in_flight, math.inf, flow_of(kind, 2, 16))
    loose_s, ordered_s = step.least_s([replace(blocks, count=0), replace(head, count=0)]), step.least_s([blocks, head])
    two_s, one_s = (step.least_s([blocks, head], Whole(0, 2, 1, stage)) for stage in (1, 0))
    assert loose_s <= ordered_s < two_s * 0.9 and one_s == math.inf, "the last piece is in the last stage"
    assert two_s >= 16 * 15.0, "two blocks and the head on one place"


def test_closer_bounds_hold_whatever_runs_again() -> None:
    """They do not rise by what runs again, which may hide collectives."""
    kind = Kind("1f1b")
    table, (head, blocks) = Timetable(kind, 2, 8), _whole(8, 8, 0.0)

    def least_s(closer: float, limit_bytes: float) -> float:
        parts = [head, replace(blocks, roomy_s=(blocks.backward_s * closer, blocks.step_s * closer))]
        return Step(table.at, 8, table.in_flight, limit_bytes, flow_of(kind, 2, 8)).least_s(parts)

    assert least_s(1.0, 160.0) * 1.05 < least_s(1.2, 160.0)
    assert least_s(1.0, 50.0) <= least_s(1.2, 50.0) < 1.2 * least_s(1.0, 50.0) * 0.99


def test_what_blocks_leave_to_each_other_counts_on_some_place() -> None:
    """A stage may have less of it by what it leaves to the next one."""
    kind = Kind("1f1b")
    table, (head, blocks) = Timetable(kind, 2, 8), _whole(8, 8, 0.0)

    def least_s(left: float) -> float:
        chain_s = [(1.2 * blocks.forward_s, left), (1.2 * blocks.backward_s, left), (1.2 * blocks.step_s, left)]
        step = Step(table.at, 8, table.in_flight, math.inf, flow_of(kind, 2, 8))
        return step.least_s([head, replace(blocks, chain_s=chain_s)])

    plain_s = Step(table.at, 8, table.in_flight, math.inf, flow_of(kind, 2, 8)).least_s([head, blocks])
    assert plain_s * 1.19 < least_s(0.0) and plain_s * 1.1 < least_s(1.0) < least_s(0.0)
    assert least_s(1e6) == pytest.approx(plain_s)
