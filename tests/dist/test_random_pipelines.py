"""Random models in random pipelines, on local ranks against one device: cut anywhere, under any schedule, with meshes
and with blocks run again."""

from __future__ import annotations

import random

import pytest

from autopar.capture import capture
from autopar.pipeline import SCHEDULES, units
from autopar.problem.clusters import Allow
from autopar.recipes import roles
from autopar.verify import case_of, verify
from tests.helpers.random_models import D, Drawn, batch, tame
from tests.helpers.ranks import living
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Sizes, Subject, by_stages, planner_of

FAST = (0, 1, 2, 3, 9)


def zero1_and_2(ways: int) -> Allow:
    """Gradients of every second weight are scattered after each microbatch, those of the others once per step."""
    once, each = roles.zero1(ways), roles.zero2(ways)
    return lambda op, option: (each if op.node.meta.get("number", 0) % 2 else once)(op, option)


MESHES: tuple[tuple[Sizes, tuple[roles.Role, ...]], ...] = (
    ((1,), (roles.nothing,)),
    ((2,), (zero1_and_2,)),
    ((2,), (roles.zero3,)),
    ((2,), (roles.tensor,)),
    ((2,), (roles.samples,)),
)


@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100) if seed not in FAST)]
)
def test_any_model_in_any_pipeline(seed: int) -> None:
    model, inputs, draw = Drawn(seed, alone=True), batch(seed), random.Random(seed)
    who = Subject(f"drawn {seed}", "train", capture(model, inputs), model.state_dict())
    (mesh, used), schedule = draw.choice(MESHES), draw.choice(sorted(SCHEDULES))
    virtual = SCHEDULES[schedule].virtual or 2
    places = draw.choice((2, 4)) if mesh == (1,) and virtual == 1 else 2
    microbatches = 1 if schedule == "naive" else D // (mesh[0] if used[0] is not roles.tensor else 1)
    pieces = len(units(planner_of(who, mesh).program))
    if not tame(model, *inputs) or pieces < places * virtual:
        assert seed not in FAST, "draw another one: its gradients explode, or it is too small"
        return
    bounds = sorted(draw.sample(range(1, pieces), places * virtual - 1))
    made = rematerialised(
        who,
        by_stages(who, mesh, used, places, microbatches, schedule, virtual, bounds),
        draw.choice(("none", "selective", "full")),
    )
    report = verify(
        case_of(who.captured, made, model.state_dict(), dict(zip(who.captured.input_names, inputs, strict=True))),
        ranks=living(made.ranks),
    )
    wrong = [row for row in report.rows if not row.ok]
    assert report.ok, f"{schedule} on {places} places of {mesh} with {used[0]}, cut at {bounds}: {wrong[:4]}\n{model}"
