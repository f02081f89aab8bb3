"""Buffers that a step changes several times, or reads before and behind a change: batch norms that are called twice
(SimCLR, BYOL), centres that move."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from tests.helpers.verify import Subject, by_chance, by_recipe

WIDTH = 8


class Encoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))


class Model(nn.Module):
    """A loss of two views of a batch, computed by `loss` of the model."""

    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.last, self.loss = Encoder(), nn.BatchNorm1d(WIDTH, affine=False), loss
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("centre", torch.ones(WIDTH))

    @property
    def running(self) -> Tensor:
        return self.encoder[1].running_mean

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.loss(self, one, other)


def simclr(model, one, other):
    first, second = F.normalize(model.encoder(one)), F.normalize(model.encoder(other))
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(one)))


def byol(model, one, other):
    with torch.no_grad():
        targets = model.target(one), model.target(other)
    return (
        4
        - F.cosine_similarity(model.encoder(one), targets[1]).mean()
        - F.cosine_similarity(model.encoder(other), targets[0]).mean()
    )


def barlow(model, one, other):
    return (model.last(model.encoder(one)).T @ model.last(model.encoder(other)) / len(one)).square().sum()


def three(model, one, other):
    return (model.encoder(one) - model.encoder(other)).square().mean() + model.encoder(one * other).square().mean()


def read_between(model, one, other):
    first = model.encoder(one)
    seen = model.running.clone()
    second = model.encoder(other)
    return (
        (first - second).square().mean() + (second.mean() * seen).sum() + (second.mean() * model.running.clone()).sum()
    )


def halved_before(model, one, other):
    with torch.no_grad():
        model.running.mul_(0.5)
    return (model.encoder(one) - other).square().mean()


def moved(model, one, other):
    """The centre is read when the new one is there, and before it is the centre."""
    h = model.encoder(one)
    new = h.detach().mean(0) * 2.0
    loss = (h - model.centre).square().mean()
    with torch.no_grad():
        model.centre.copy_(new)
    return loss + (model.centre * other).mean()


def moco(model, one, other):
    """The target follows the encoder, one off, so that all of it changes."""
    with torch.no_grad():
        for target, weight in zip(model.target.parameters(), model.encoder.parameters(), strict=True):
            target.data.mul_(0.9).add_(weight.data + 1, alpha=0.1)
        targets = F.normalize(model.target(other))
    return F.cross_entropy(F.normalize(model.encoder(one)) @ targets.T / 0.1, torch.arange(len(one)))


LOSSES = {loss.__name__: loss for loss in (simclr, byol, barlow, three, read_between, halved_before, moved, moco)}


class Views(Subject):
    """A subject whose batch is two tensors."""

    def batch(self, batch: int = 8, seq: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {name: torch.randn(batch, WIDTH, generator=generator) for name in self.captured.input_names}


@cache
def views(name: str) -> Views:
    model = Model(LOSSES[name])
    return Views(
        name,
        "train",
        capture(model, (torch.randn(8, WIDTH), torch.randn(8, WIDTH))),
        {n: t.clone() for n, t in model.state_dict().items()},
    )


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_is_the_model(name: str) -> None:
    """The new values of buffers too."""
    who = views(name)
    model, batch = Model(LOSSES[name]).double(), {key: value.double() for key, value in who.batch().items()}
    loss = model(*batch.values())
    loss.backward()
    found = who.case(by_recipe(who, (4,), "ddp"), 8).reference()
    torch.testing.assert_close(found["output"]["loss"], loss.detach(), rtol=1e-12, atol=0.0)
    for fqn, grad in found["gradient"].items():
        torch.testing.assert_close(grad, model.get_parameter(fqn).grad, rtol=1e-10, atol=1e-12)
    kept = {fqn: value for fqn, value in (*model.named_buffers(), *model.named_parameters()) if not value.requires_grad}
    changed = {fqn for fqn, value in kept.items() if not torch.equal(value, who.weights[fqn].to(value.dtype))}
    assert changed == set(found["buffer"])
    for fqn, value in found["buffer"].items():
        torch.testing.assert_close(value, kept[fqn].detach(), rtol=1e-12, atol=1e-14)


FAST = [("halved_before", "tp"), ("moco", "zero3"), ("moco", "random")]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *FAST,
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in LOSSES
            for how in ("ddp", "zero3", "tp", "random")
            if (name, how) not in FAST
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    who = views(name)
    report = who.verified(by_chance(who, (2, 2), 0) if how == "random" else by_recipe(who, (4,), how), 8)
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])
