"""Buffers that repeated blocks change (running statistics) on ranks: every instance has its own, as on one device."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.codegen.edges import edges
from autopar.problem.read_graph import read
from autopar.verify import Case, case_of
from tests.helpers.verify import Subject, planned, verified

DEPTH = 6


class Block(nn.Module):
    """A convolution with batch norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.conv(x)).relu()


class Stack(nn.Module):
    """A stem, blocks and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


@cache
def subject() -> Subject:
    """The stack, captured."""
    torch.manual_seed(0)
    model = Stack().double()
    captured = capture(model, batch())
    (call,) = (n for n in captured.gm.graph.nodes if "repeat" in n.meta)
    assert call.meta["repeat"] == DEPTH and not captured.notes
    assert not any(entry["kind"] == "mutation" for entry in captured.gm.meta["outputs"])
    return Subject("stack", "train", captured, model.state_dict())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and targets; the images' mean is far from the buffers' first values."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, 4, 6, 6, generator=generator, dtype=torch.float64) + 2 for _ in range(2))  # type: ignore[return-value]


def case(how: str) -> Case:
    """The stack on two ranks."""
    who = subject()
    return case_of(who.captured, planned(who, (2,), how), who.weights, dict(zip(("x", "y"), batch(), strict=True)))


@pytest.mark.parametrize("how", ["ddp", "zero3", "random 0", "random 1"])
def test_every_instance_updates_its_own_statistics(how: str) -> None:
    report = verified(case(how))
    assert report.ok, (report.first, report.worst)
    names = {row.name for row in report.rows if row.kind == "buffer"}
    assert names == {
        f"layers.{i}.norm.{key}" for i in range(DEPTH) for key in ("running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self.changed(block, changed)", "pass"),  # nobody takes the new values
        (
            "self.changed(block, changed)",
            'self.changed(self.runs["layers_0"][0], changed)',
        ),  # always to the first instance
    ],
)
def test_a_planted_error_in_the_statistics_is_found(right: str, wrong: str) -> None:
    made = case("ddp")
    planted = Case(
        made.gm,
        made.plan,
        made.names,
        made.weights,
        made.constants,
        made.batch,
        made.notes,
        mutate=partial(_plant, right, wrong),
    )
    report = verified(planted)
    assert not report.ok
    assert {row.kind for row in report.rows if not row.ok} == {"buffer"}


def test_statistics_of_the_batch_in_evaluation_are_found() -> None:
    """A training step knows no difference."""
    planted = replace(case("ddp"), mutate=lambda source: re.sub(r"in_training\((.*), self\.b.*", r"(\1)", source))
    report = verified(planted)
    wrong = {row.title for row in report.rows if not row.ok}
    assert "loss, in evaluation after the steps" in wrong and all(
        name.endswith("in evaluation after the steps") for name in wrong
    ), wrong
    assert report.first.startswith("none in the first step: wrong is evaluation after the steps"), report.first


def _plant(right: str, wrong: str, source: str) -> str:
    assert source.count(right) == 1
    return source.replace(right, wrong)


@pytest.mark.parametrize("tracked", [True, False])
def test_where_a_batch_is_split_nothing_but_sums_of_channels_is_sent_between_operators(tracked: bool) -> None:
    """Statistics are partial sums; no rank has the samples of another."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=tracked), nn.ReLU(), nn.Conv2d(4, 4, 3)
    )
    captured = capture(model, (torch.randn(8, 4, 6, 6),), loss_fn=lambda x: x.square().mean())
    made = planned(Subject("one norm", "train", captured, model.state_dict()), (2,), "ddp")
    program = read(captured.gm, made.hints, training=True)
    sent = [
        reshard
        for reshard in edges(program, made).reshards
        if reshard.role == "edge" and any(program.ops[name].role == "op" for name in reshard.readers)
    ]
    sizes = {math.prod(program.ops[reshard.ref[0]].call.outs[reshard.ref[1]].shape) for reshard in sent}
    assert sizes == {4}, sent
