"""Numbers that a model makes of the sizes of its inputs: on every rank they are those of the whole batch, whatever that
is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import PlanError
from tests.helpers.verify import Subject, by_chance, by_recipe

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * (1.0 / x.shape[0] ** 0.5)


class Model(nn.Module):
    """Blocks alike, and a loss of what they give and of the input."""

    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.loss = nn.ModuleList(Block() for _ in range(3)), loss

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        return self.loss(h, x)


LOSSES = {
    "added": lambda h, x: 0.5 * h.square().sum() + 0.5 * len(x) * math.log(2 * math.pi),
    "one over": lambda h, x: (1.0 / x.shape[0]) * h.square().sum(),
    "times": lambda h, x: h.square().sum() * (0.5 * x.shape[0]),
    "divided": lambda h, x: h.square().sum() / (x.shape[0] * 0.5),
    "a root": lambda h, x: h.square().sum() / x.shape[0] ** 0.5,
    "a square root": lambda h, x: h.square().sum() / torch.sym_sqrt(x.shape[0]),
    "by elements": lambda h, x: (h - 0.1 * len(x)).square().sum() / len(x),
    "filled": lambda h, x: (h * torch.full((len(x), WIDTH), 1.0 / len(x))).sum(),
    "scaled": lambda h, x: torch.add(h, h.exp(), alpha=0.1 * len(x)).sum() / len(x),
    "whole": lambda h, x: h.sum() * (math.floor(0.3 * len(x)) + math.ceil(len(x) ** 0.5)),
}


class Rows(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 16, seq: int = 0) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1))}


def rows(name: str) -> Rows:
    """Captured at another batch than what it is given."""
    model = Model(LOSSES[name])
    return Rows(name, "train", capture(model, (torch.zeros(8, WIDTH),)), model.state_dict())


@pytest.mark.parametrize("name", LOSSES)
def test_equals_one_device(name: str) -> None:
    who = rows(name)
    for plan in (by_recipe(who, (4,), "ddp"), by_recipe(who, (2, 2), "tp_zero3"), by_chance(who, (2, 2), 0)):
        report = who.verified(plan, 16)
        assert report.ok, (plan.strategy, report.first, [row for row in report.rows if not row.ok][:4])


@pytest.mark.parametrize("name", ["added", "a root"])
def test_it_is_the_loss_of_the_model(name: str) -> None:
    who = rows(name)
    model, batch = Model(LOSSES[name]).double(), {key: value.double() for key, value in who.batch().items()}
    found = who.case(by_recipe(who, (4,), "ddp"), 16).reference()["output"]["loss"]
    torch.testing.assert_close(found, model(*batch.values()).detach(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (lambda x: x.sum().item(), "leave it a tensor"),
        (lambda x: x.sum().int().item(), "leave it a tensor"),
        (lambda x: round(0.3 * len(x)), "has no source form"),
    ],
)
def test_others_are_refused(number, why) -> None:
    with pytest.raises(PlanError, match=why):
        autopar.compile(Model(lambda h, x: h.sum() * number(x)), "cpu:1x2", (torch.randn(8, WIDTH),), recipe="ddp")
