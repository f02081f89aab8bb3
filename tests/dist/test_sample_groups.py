"""Samples that are looked at in groups (several answers to one question, whose rewards are compared): ranks and
microbatches have whole groups."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api import compile
from autopar.capture import capture
from autopar.errors import InfeasibleError, PlanError, RunError
from autopar.plan import Plan
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

GROUP, BATCH, WORDS = 4, 16, 6


class Block(nn.Module):
    """A map whose result is added."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.map(h))


class Policy(nn.Module):
    """How likely answers are, weighted by how much better they are than the others of their group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor, rewards: Tensor, old: Tensor) -> Tensor:
        h = self.words(ids)
        for layer in self.layers:
            h = layer(h)
        likely = F.log_softmax(self.head(h)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        groups = rewards.view(-1, GROUP)
        better = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ratio, gain = (likely - old).exp(), better.view(-1, 1)
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def batch(samples: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(0, 32, (samples, WORDS), generator=generator),
        "rewards": torch.randn(samples, generator=generator),
        "old": torch.randn(samples, WORDS - 1, generator=generator) - 4,
    }


@cache
def subject() -> Subject:
    model = Policy()
    return Subject("groups", "train", capture(model, (), batch()), model.state_dict())


PLANS = {
    "ranks": lambda: planned(subject(), (2,), "ddp"),
    "microbatches": lambda: by_stages(subject(), (1,), "single", 2, 2, "gpipe"),
    "both": lambda: by_stages(subject(), (2,), "ddp", 2, 2, "1f1b"),
    "microbatches, whole rewards": lambda: _whole(by_stages(subject(), (2,), "ddp", 2, 2, "1f1b")),
}


def _whole(made: Plan) -> Plan:
    """The plan with rewards whole on every rank until their groups are compared."""
    at_once = {name: node for name, node in made.nodes.items() if name in ("rewards", "reshape_default")}
    assert len(at_once) == 2, list(made.nodes)
    whole = {
        name: replace(node, outs=("R|-",), ins=("R|-",) * len(node.ins), kinds=("replicated",))
        for name, node in at_once.items()
    }
    return replace(made, nodes={**made.nodes, **whole})


@pytest.mark.parametrize("what", PLANS)
def test_equals_one_device(what: str) -> None:
    who, made = subject(), PLANS[what]()
    report = verify(case_of(who.captured, made, who.weights, batch()), ranks=living(made.ranks))
    assert report.ok, (report.first, report.worst)


@pytest.mark.parametrize("what", [what for what in PLANS if what != "ranks"])
def test_parts_of_groups_are_refused(what: str) -> None:
    """Two samples of one group and two of another are four samples, too."""
    who, made = subject(), PLANS[what]()
    samples = BATCH // 2 if what != "microbatches" else 3 * GROUP
    with pytest.raises(
        RunError, match=r"b\) // 4\) = [23] does not divide by the [24] parts that ranks and microbatches"
    ):
        verify(case_of(who.captured, made, who.weights, batch(samples)), ranks=living(made.ranks))


def test_microbatches_without_a_whole_group_are_refused_when_planned() -> None:
    """The shape is planned for 8 samples."""
    with pytest.raises(
        PlanError, match=r"one microbatch, fewer microbatches or a larger batch, if these are groups of s"
    ):
        by_stages(subject(), (1,), "single", 2, 4, "1f1b")


@pytest.mark.parametrize(("samples", "ranks", "recipe"), [(16, 4, "1f1b"), (8, 2, "1f1b"), (8, 4, None)])
def test_plans_have_whole_groups_in_each_microbatch(samples: int, ranks: int, recipe: str | None) -> None:
    """Microbatches of half a group were planned, and the search ended with an error of a rule."""
    made = compile(Policy(), f"cpu:1x{ranks}", batch(samples), recipe=recipe, time_limit_s=20.0).plan
    parts = made.microbatches * math.prod(made.mesh)
    assert recipe is None or (made.pipelined and samples // GROUP % parts == 0), (made.mesh, made.microbatches)
    who = subject()
    report = verify(case_of(who.captured, made, who.weights, batch(samples)), ranks=living(made.ranks))
    assert report.ok, (report.first, report.worst)


def test_too_few_groups_for_a_pipeline_are_told() -> None:
    with pytest.raises(InfeasibleError, match="no way to lay"):
        compile(Policy(), "cpu:1x4", batch(8), recipe="1f1b", mesh=(2,))
