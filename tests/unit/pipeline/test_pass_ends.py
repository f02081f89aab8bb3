"""What a stage waits for at the begin and the end of each pass."""

from __future__ import annotations

import pytest

from autopar.pipeline.once_per_step import Update
from autopar.pipeline.pass_ends import Sent, Stop, ends_s
from autopar.problem.hiding import Load


def _on(axis: int, seconds: float = 1.0) -> Load:
    return Load(axis, seconds, {"link": 1.0}, "all_gather")


def _sent(*loads: Load, nbytes: float = 1e9) -> Sent:
    return Sent(loads, nbytes)


def test_a_stage_waits_for_its_first_gathers_and_the_last_of_what_it_sends() -> None:
    stops = [Stop(2.0, takes=[(1, _sent(_on(0)))]), Stop(8.0, sends=[_sent(_on(0, 3.0))])]
    assert ends_s(stops, 1, 0.0) == ends_s(stops, 3, 0.0) == pytest.approx((1.0, 3.0))
    assert ends_s(stops, 1, 0.1) == pytest.approx((0.9, 2.7))  # what runs then takes compute units from nothing
    assert ends_s([Stop(2.0)], 1, 0.0) == (0.0, 0.0)


def test_what_compute_waits_for_is_not_behind_gathers_of_its_axis() -> None:
    """It has a line of its own: only the second collective of the two that compute waits for is behind the first."""
    taken, waited = _sent(_on(0, 5.0)), (0, _on(0))
    alone, behind = (
        ends_s([Stop(20.0, takes=[(1, taken)]), Stop(1.0, waits=waits)], 3, 0.0) for waits in ([], [waited, waited])
    )
    assert alone == behind == pytest.approx((5.0, 0.0))


def test_over_two_axes_all_that_is_begun_together_waits_for_its_first_collectives() -> None:
    """Those of its own and of the block behind it: of small blocks too, of which first collectives have begun for
    several."""
    two = [Stop(10.0, takes=[(1, _sent(_on(0), _on(1)))])]
    assert ends_s(two, 1, 0.0)[0] == pytest.approx(2.0)
    # the second block's first collective and this one's second run side by side
    assert ends_s(two, 3, 0.0)[0] == pytest.approx(2.0)
    small = [Stop(10.0, takes=[(1, _sent(_on(0), _on(1, 0.5), nbytes=10e6))])]
    assert ends_s(small, 3, 0.0)[0] == pytest.approx(2.0)


def test_a_weight_that_a_place_has_once_is_stepped_once() -> None:
    update = Update({"embedding": None, "head": None}, 3.0)
    assert update.too_many_s(["embedding", "layers", "layers", "head"]) == 3.0
    assert update.too_many_s(["layers", "head"]) == 0.0
