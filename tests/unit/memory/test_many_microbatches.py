"""What a place holds in a step of many microbatches is told from fewer (orders.telling)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.joint.timetables import SEARCHED, Kind, timetable
from autopar.memory import Prediction, predict
from autopar.memory.place import Holding
from autopar.memory.predict import fullest
from autopar.pipeline.orders import orders, telling
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.transit import transits
from tests.helpers.verify import by_stages, subject
from tests.unit.memory.test_predict import program

UNREAD: Any = None
STEADY = [kind for kind in SEARCHED if not SCHEDULES[kind.schedule].forwards_first]


def moments(kind: Kind, places: int, microbatches: int, *, works_hold: bool) -> list[set[object]]:
    """Of each place all that it holds at a time beside what rests: which action runs, what waits, and what is in
    transit."""
    table = timetable(kind, places, microbatches)
    found = []
    for place, (line, transit) in enumerate(
        zip(
            orders(kind.schedule, places, table.stages, microbatches),
            transits(kind.schedule, places, table.stages, microbatches, works_hold=works_hold),
            strict=True,
        )
    ):
        profiles: dict[int, Any] = dict.fromkeys(table.of_place(place, range(table.stages)))
        here = Holding(UNREAD, place, (), profiles, True, line, transit)
        found.append(
            {
                (action.stage, action.kind, *waiting.items(), *halfway.items(), *sorted(now.items()))
                for action, waiting, halfway, now in here._actions_with_waiting()
            }
        )
    return found


@pytest.mark.parametrize("works_hold", [False, True])
@pytest.mark.parametrize("places", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "kind",
    [each for kind in STEADY for each in kind.decided(4, 4, 32)],
    ids=lambda kind: f"{kind.schedule}-{kind.virtual}",
)
def test_few_microbatches_hold_all_that_many_do(kind: Kind, places: int, works_hold: bool) -> None:
    many = 16 * places
    few = timetable(kind, places, many).short[-1]
    assert few < many / 2
    assert moments(kind, places, few, works_hold=works_hold) == moments(kind, places, many, works_hold=works_hold)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble", "gpipe"])
def test_the_peak_of_many_microbatches_is_that_of_all(schedule: str) -> None:
    cut = by_stages(subject("hf-llama-deep"), (1,), "ddp", 2, 8, schedule, SCHEDULES[schedule].virtual or 2)
    plan = replace(cut, microbatches=24)
    assert (telling(schedule, plan.places, plan.microbatches) < plan.microbatches) == (schedule != "gpipe")
    graph = program("hf-llama-deep", batch=24)
    assert predict(graph, plan) == Prediction(tuple(rank.place() for rank in fullest(graph, plan)))
    assert telling(schedule, plan.places, plan.places) == plan.places
