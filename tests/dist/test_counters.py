"""Buffers that count steps, in pipelines: each stage that reads one has a copy, all change once a step, behind it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import PlanError
from autopar.pipeline import barred, units
from autopar.verify import case_of, verify
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planner_of

STEPS = 3


class Counting(nn.Module):
    """Layers that are scaled by how many steps there were; the counter changes `first` of all, or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c = first, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.steps.add_(1.0)
        hidden = self.a(x) * (1 / self.steps)
        hidden = self.c(self.b(hidden.relu()) * (1 / self.steps))
        if not self.first:
            self.steps.add_(1.0)
        return hidden.square().mean()


class Averaging(nn.Module):
    """A running sum of activations, read in the middle and changed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b((self.a(self.front(x)) * self.mean.clone()).relu())
        self.mean.copy_(hidden.detach().sum(0))
        return hidden.square().mean()


def data() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def subject(first: bool) -> Subject:
    torch.manual_seed(0)
    model = Counting(first)
    return Subject("counting", "train", capture(model, (data().float(),)), model.state_dict())


def trained(source: str, rank_case: RankCase) -> tuple[list[float], dict[str, Tensor]]:
    """One rank: the losses of some steps, and the buffers of all stages behind them."""
    module = rank_case.build(source)
    batch = module.shard_batch(data())
    losses = [float(module.train_step(*batch)) for _ in range(STEPS)]
    return losses, {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in module.named_buffers()
    }


@pytest.mark.parametrize(
    ("first", "microbatches", "schedule"),
    [
        (True, 4, "1f1b"),
        (False, 1, "naive"),
        *(
            pytest.param(first, n, how, marks=pytest.mark.slow)
            for first in (False, True)
            for n, how in ((2, "gpipe"), (4, "1f1b"), (4, "zbv_zero_bubble"))
        ),
    ],
)
def test_all_stages_count_alike(first: bool, microbatches: int, schedule: str) -> None:
    who = subject(first)
    model = Counting(first).double()
    model.load_state_dict(dict(who.weights))
    right = [float(model(data()).detach()) for _ in range(STEPS)]
    made = by_stages(who, (1,), "single", 2, microbatches, schedule, 2 if schedule.startswith("zbv") else 1)
    case = case_of(who.captured, made, who.weights, {"x": data()})
    assert verify(case, ranks=living(2)).ok
    places = living(2).run(trained, case.source(), case.rank_case)
    for losses, buffers in places:
        assert losses == pytest.approx(right, rel=1e-12)
        assert all(
            torch.equal(value.double(), dict(model.named_buffers())[name.rpartition(".")[2]])
            for name, value in buffers.items()
        ), buffers
    assert sum(any(name.endswith("steps") for name in buffers) for _, buffers in places) == 2


def test_a_new_value_of_activations_that_an_earlier_stage_reads_is_refused() -> None:
    torch.manual_seed(0)
    model = Averaging()
    who = Subject("averaging", "train", capture(model, (data().float(),)), model.state_dict())
    with pytest.raises(PlanError, match=r"sum\w* .*would not compute what the batch computes|sum over the whole batch"):
        by_stages(who, (1,), "single", 2, 2, "gpipe")
    refused, program = [], planner_of(who, (1,)).program
    for bound in range(1, len(units(program))):
        case = case_of(
            who.captured, by_stages(who, (1,), "single", 2, 1, "naive", bounds=[bound]), who.weights, {"x": data()}
        )
        try:
            case.source()
        except PlanError as error:
            assert "makes the new value of buffer mean, which stage 0 reads" in str(error)
            refused.append(bound)
        else:
            assert verify(case, ranks=living(2)).ok
    assert refused and tuple(refused) == barred(program)


def test_the_search_cuts_where_a_new_value_is_made_where_its_buffer_is_read() -> None:
    torch.manual_seed(0)
    compiled = autopar.compile(Averaging(), "cpu:1x2", (data().float(),), recipe="naive_mp")
    assert len(compiled.plan.stages) == 2 and "mean" in compiled.source
