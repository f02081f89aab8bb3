"""Cuts by profiles: bounds that are possible, whose stages have the shares that were asked for; and what searches that
begin at them gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.joint.timetables import Kind, timetable
from autopar.pipeline import cut_search
from autopar.pipeline.cut_search import Shifting
from autopar.pipeline.filling import Cuts
from autopar.pipeline.orders import StageTime
from autopar.pipeline.ramps import profiles, ramped
from autopar.pipeline.stretches import Cost, Pieces
from tests.helpers.examples import examples


@examples(60)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=4, max_size=30),
    st.integers(2, 12),
    st.frozensets(st.integers(1, 29), max_size=5),
)
def test_every_stage_begins_where_one_may_and_has_a_piece(
    seconds: list[float], stages: int, barred: frozenset[int]
) -> None:
    ends = [end for end in range(1, len(seconds)) if end not in barred]
    found = ramped([seconds] * stages, ends)
    assert bool(found) == (len(ends) >= stages - 1) and len(set(found)) == len(found)
    for bounds in found:
        assert len(bounds) == stages - 1 and set(bounds) <= set(ends) and [*bounds] == sorted(set(bounds))


def test_stages_have_the_shares_of_a_profile_and_fast_places_more() -> None:
    """Of 1,000 pieces alike: to within one piece what each profile says; of two places of which one is three times as
    fast, three quarters where all stages are as long."""
    bounds = np.array(ramped([[1.0] * 1000] * 4, range(1, 1000)))
    shares = profiles(4) / profiles(4).sum(1, keepdims=True)
    for row in bounds:
        sizes = np.diff([0, *row, 1000]) / 1000
        assert np.abs(shares - sizes).max(1).min() < 1.1e-3
    assert any(bound == pytest.approx(750, abs=1) for (bound,) in ramped([[1.0] * 1000, [3.0] * 1000], range(1, 1000)))


def _time(stage: int, part: Sequence[Cost], send_s: float) -> StageTime:
    forward_s = sum(c.forward_s for c in part)
    return StageTime(forward_s, 1.4 * forward_s, 0.8 * forward_s, send_s)


def test_stages_that_get_longer_from_the_first_on_are_found() -> None:
    """Two microbatches on two places of six stages each, as of 8B on 64 devices: no move of one piece from the even cut
    leads to the fastest that are known."""
    table = timetable(Kind("interleaved_zero_bubble", 6), 2, 2)
    pieces = Pieces([Cost(3.2, forward_s=1.0, rest_bytes=1.0)] * 36, [Cost(4.2, forward_s=1.0, rest_bytes=1.0)] * 36)

    def found_s(ramps: int) -> tuple[float, Cuts]:
        shifting = Shifting(
            [pieces] * 12,
            table.in_flight,
            [math.inf] * 2,
            table.at,
            (),
            range(36),
            [0.05] * 37,
            _time,
            table.ends_all_s,
            table.actions,
        )
        with patch.object(cut_search, "RAMPED", ramps):
            cuts = shifting.shifted(Cuts([*range(3, 36, 3)], [0] * 12))
        return float(shifting.steps_s([cuts])[0]), cuts

    (moved_s, _), (ramped_s, cuts) = found_s(0), found_s(cut_search.RAMPED)
    assert ramped_s < moved_s * 0.995
    sizes = np.diff([0, *cuts.bounds, 36])
    assert sizes[:3].mean() < 3 < sizes[5:-1].mean()
