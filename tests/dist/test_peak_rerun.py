"""The predicted peak where blocks of a stage are run again, all or some of them, against every allocation that torch's
profiler sees on a rank."""

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
from tests.dist.test_peak import compared
from tests.helpers.captures import captured_once
from tests.helpers.peak import is_counted
from tests.helpers.remat import rematerialised
from tests.helpers.verify import by_stages, subject


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
    mesh = (2,) if len(again) == 1 else (1,)
    with captured_once("six blocks"):
        made = autopar.compile(model, "cpu:1x2", args, recipe=recipe, remat=level, mesh=mesh, time_limit_s=5.0)
    (scope,) = made.plan.remat
    plan = replace(
        made.plan,
        stages=tuple(replace(stage, again={scope: n}) for stage, n in zip(made.plan.stages, again, strict=True)),
    )
    bundle = Bundle(plan, emit(made.captured.gm, plan, Names.of(made.captured)), made.captured.constants)
    places = predict(read(made.captured.gm, made.captured.hints, training=True, device="cpu"), plan).places
    is_counted(places, bundle, model.state_dict(), dict(zip(made.captured.input_names, args, strict=True)), 0.05)


@pytest.mark.parametrize(("schedule", "close"), [("1f1b", 0.005), ("gpipe", 0.03)])
def test_sends_hold_what_they_have_sent(schedule: str, close: float) -> None:
    """Gloo's works, as long as torch's schedules hold them: GPipe until the step ends, 1F1B one of them for the most
    part of it. With blocks that are run again they are a tenth of the peak. Under GPipe gradients of weights, which the
    first backward makes one by one, are counted from its begin."""
    who = subject("hf-llama")
    compared(who, rematerialised(who, by_stages(who, (1,), "single", 2, 4, schedule), "full"), close)
