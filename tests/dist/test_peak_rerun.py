"""The predicted peak where some blocks of a stage are run again and others are not, against every allocation that
torch's profiler sees on a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.bundle import Bundle
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.memory import predict
from autopar.problem.read_graph import read
from models import gpt
from tests.dist.test_peak import beside_state
from tests.helpers.peak import counted_on_rank
from tests.helpers.ranks import living


@pytest.mark.parametrize(
    ("recipe", "level", "again"),
    [
        ("ddp", "full", (5,)),
        ("ddp", "selective", (5,)),
        ("zero3", "full", (1,)),
        ("zero3", "full", (5,)),
        ("1f1b", "full", (1, 1)),
        ("1f1b", "full", (2, 2)),
        ("interleaved", "full", (0, 1, 0, 1)),
    ],
)
def test_the_peak_where_the_first_blocks_are_run_again_is_counted(
    recipe: str, level: str, again: tuple[int, ...]
) -> None:
    """Of six blocks of one stage, three of each of two, or one and two of four."""
    torch.manual_seed(0)
    model, args = gpt.build(gpt.Config(vocab=256, positions=16, layers=6, heads=4, hidden=64), 64, 16)
    made = autopar.compile(
        model, "cpu:1x2", args, recipe=recipe, remat=level, mesh=(2,) if len(again) == 1 else (1,), time_limit_s=5.0
    )
    (scope,) = made.plan.remat
    plan = replace(
        made.plan,
        stages=tuple(replace(stage, again={scope: n}) for stage, n in zip(made.plan.stages, again, strict=True)),
    )
    bundle = Bundle(plan, emit(made.captured.gm, plan, Names.of(made.captured)), made.captured.constants)
    seen = living(2).run(
        counted_on_rank, bundle, dict(model.state_dict()), dict(zip(made.captured.input_names, args, strict=True))
    )
    for place in predict(read(made.captured.gm, made.captured.hints, training=True, device="cpu"), plan).places:
        assert beside_state(place, "forward", "backward", "sums of gradients") == pytest.approx(
            seen[place.number].step_bytes, rel=0.05
        ), place.number
