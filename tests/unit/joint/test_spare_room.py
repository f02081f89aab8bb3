"""Glances leave the room that runs take beyond what is added up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cluster import Cluster, Places
from autopar.joint.place_kinds import Ground
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.spare_room import Spare
from autopar.joint.timetables import Kind, timetable
from autopar.memory import predict
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import subject

SHAPE = Shape(1, (2,), 4)


def pricing(limit_bytes: float | None = None) -> Pricing:
    """Of a small GPT-2, whose loss over the vocabulary takes temporary memory."""
    who = subject("hf-gpt2")
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), time_limit_s=math.inf, memory_bytes=limit_bytes)
    return Pricing(SearchContext(who.captured.gm, {**who.captured.hints, "b": 64}, request), SEARCH)


@pytest.fixture(scope="module")
def limit_bytes() -> float:
    """More than the fastest plan takes by what is added up, and less than it takes as it runs."""
    roomy = pricing().glance(SHAPE, math.inf)
    walked = predict(roomy.program, roomy.plan).peak_bytes
    assert walked > 1.02 * roomy.memory_bytes
    return (walked + roomy.memory_bytes) / 2


def test_a_glance_is_walked_and_leaves_the_room_that_was_missing(limit_bytes: float) -> None:
    short = pricing(limit_bytes)
    found = short.glance(SHAPE, math.inf)
    assert predict(found.program, found.plan).peak_bytes <= limit_bytes
    assert found.ground.limits == (limit_bytes,) and short.spare[SHAPE].last_bytes > 0
    assert short.proven[SHAPE] <= found.step_s
    exact = short.exact(found)
    assert exact is not None and exact.step_s <= found.step_s * (1 + 1e-9)


def test_what_is_far_from_the_fastest_is_not_walked(limit_bytes: float) -> None:
    short = pricing(limit_bytes)
    found = short.glance(SHAPE, math.inf)
    again = pricing(limit_bytes)
    again.glance(SHAPE, math.inf, found.step_s / 2)
    assert not again.spare


@pytest.mark.parametrize(
    ("kind", "limits"),
    [(Kind("1f1b"), (80.0, 80.0, 80.0, 70.0)), (Kind("zbv_zero_bubble", 2), (70.0, 80.0, 80.0, 80.0))],
)
def test_more_stays_free_on_the_place_of_the_last_stage(kind: Kind, limits: tuple[float, ...]) -> None:
    """Of which the loss is."""
    places = Places(Cluster.parse("h100:1x4"), 4, (1,))
    table, ground = timetable(kind, 4, 8), Ground(places, (0,) * 4, (100.0,) * 4)
    assert Spare(30.0, 20.0).left(ground, table).limits == limits
    assert Spare(30.0, 20.0).mean_bytes(4) == 22.5


def test_what_fits_as_it_runs_asks_for_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: Any = SimpleNamespace(places=[SimpleNamespace(peak_bytes=nbytes) for nbytes in (90.0, 100.0)])
    monkeypatch.setattr("autopar.joint.spare_room.predict", lambda program, plan: walked)

    def found(limit: float) -> Any:
        return SimpleNamespace(
            program=None,
            plan=None,
            ground=SimpleNamespace(limits=(limit, limit)),
            places_bytes=(85.0, 97.0),
            table=SimpleNamespace(at=[0, 1]),
        )

    assert Spare.of(found(100.0)) is None
    assert Spare.of(found(99.0)) == Spare(3.0, 5.0)
