"""Pipelines with fewer microbatches than places, some of which always wait, on ranks: under every schedule that runs
them."""

from __future__ import annotations

import pytest

from autopar.pipeline import SCHEDULES
from autopar.recipes import roles
from tests.helpers.verify import by_stages, right, subject


@pytest.mark.parametrize(
    "schedule",
    [
        "zbv_zero_bubble",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
        ),
    ],
)
def test_two_microbatches_on_four_places_equal_one_device(schedule: str) -> None:
    who, virtual = subject("hf-t5"), SCHEDULES[schedule].virtual or 2
    right(who.verified(by_stages(who, (1,), (roles.nothing,), 4, 2, schedule, virtual)))
