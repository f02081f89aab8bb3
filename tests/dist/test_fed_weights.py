"""A weight that repeated blocks are given from outside, as DeBERTa's positions: it is gathered, and its gradient
summed, with those of all other readers."""

from __future__ import annotations

import random

import pytest

from autopar.pipeline import SCHEDULES, units
from autopar.recipes import roles
from tests.helpers.fed import fed
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Sizes, by_chance, by_recipe, by_stages, planner_of, right

PLACES: dict[str, tuple[Sizes, tuple[roles.Role, ...]]] = {
    "one rank": ((1,), (roles.nothing,)),
    "tensor": ((2,), (roles.tensor,)),
    "zero0": ((2,), (roles.data,)),
    "zero1": ((2,), (roles.zero1,)),
    "zero2": ((2,), (roles.zero2,)),
    "zero3": ((2,), (roles.zero3,)),
}
"""What places of pipelines are: the mesh of each, and the roles of its axes."""

EACH = [
    ("gpipe", "zero0"),
    ("1f1b", "zero1"),
    ("1f1b", "zero2"),
    ("1f1b", "zero3"),
    ("interleaved_zero_bubble", "zero0"),
    ("zbv_zero_bubble", "zero1"),
    ("interleaved_zero_bubble", "zero3"),
    ("interleaved_1f1b", "tensor"),
]


@pytest.mark.parametrize("model", ["", "read"])
@pytest.mark.parametrize("how", ["ddp", "zero1", "zero2", "zero3", "tp", *(f"random {seed}" for seed in range(4))])
def test_equals_one_device(how: str, model: str) -> None:
    who, sizes = fed(model), (2, 2) if how.startswith("random") else (4,)
    right(
        who.verified(
            by_chance(who, sizes, int(how.removeprefix("random")))
            if how.startswith("random")
            else by_recipe(who, sizes, how)
        )
    )


@pytest.mark.parametrize("model", ["stem head", "read last"])
@pytest.mark.parametrize(
    ("schedule", "place"),
    [
        *EACH,
        *(
            pytest.param(schedule, place, marks=pytest.mark.slow)
            for schedule in SCHEDULES
            for place in PLACES
            if (schedule, place) not in EACH and schedule != "naive"
        ),
    ],
)
def test_stages_that_use_one_weight(schedule: str, place: str, model: str) -> None:
    """Blocks of all stages are fed the weight; with the second model the first stage and the last one read it
    besides."""
    who, (mesh, used) = fed(model, 4), PLACES[place]
    right(who.verified(by_stages(who, mesh, used, 2, 4, schedule, SCHEDULES[schedule].virtual or 2)))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 90))])
def test_any_pipeline(seed: int) -> None:
    draw = random.Random(seed)
    who = fed(
        " ".join(word for word in ("stem", "head", "read", "last", "normed") if draw.random() < 0.5),
        draw.choice((2, 3, 5)),
    )
    (mesh, used), schedule = PLACES[draw.choice(sorted(PLACES))], draw.choice(sorted(SCHEDULES.keys() - {"naive"}))
    virtual, places = SCHEDULES[schedule].virtual or 2, 2
    pieces = len(units(planner_of(who, mesh).program))
    assert pieces >= places * virtual
    bounds = sorted(draw.sample(range(1, pieces), places * virtual - 1))
    made = by_stages(who, mesh, used, places, 4, schedule, virtual, bounds)
    right(who.verified(rematerialised(who, made, draw.choice(("none", "selective", "full")))))
