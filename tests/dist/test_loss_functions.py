"""Loss functions beside the model: of each row and with masks, modules, with weights of classes from elsewhere, with
defaults and `*targets`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import Captured, capture, lift
from autopar.verify import case_of, verify
from autopar.verify.reference import train_step
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

CLASSES, WIDTH, BATCH, LENGTH = 8, 4, 8, 6
WEIGHTS = torch.linspace(0.1, 2, CLASSES, dtype=torch.float64)


class Rows(nn.Module):
    """Logits of each position, as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).flatten(0, 1)


def each(rows: Tensor, labels: Tensor, **settings) -> Tensor:
    return F.cross_entropy(rows, labels.flatten(), reduction="none", **settings)


def focal(rows: Tensor, labels: Tensor) -> Tensor:
    found = each(rows, labels)
    return ((1 - torch.exp(-found)) ** 2 * found).mean()


def of_some(rows: Tensor, *targets: Tensor) -> Tensor:
    return (each(rows, targets[0]) * targets[1].flatten()).sum() / targets[1].sum()


def with_default(rows: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
    return each(rows, labels).mean() if shares is None else (each(rows, labels).view_as(shares) * shares).mean()


def of_picked(rows: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(rows[mask], labels[mask]) + 0.1 * (rows.square().sum(-1)[mask] * 0.5).mean()


class Flat(nn.Module):
    """A loss of rows whose labels are not rows."""

    def __init__(self, loss: nn.Module, one_hot: bool = False) -> None:
        super().__init__()
        self.loss, self.one_hot = loss, one_hot

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        flat = labels.clamp(0).flatten() if self.one_hot else labels.flatten()
        return self.loss(rows, F.one_hot(flat, CLASSES).to(rows.dtype) if self.one_hot else flat)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean of each": lambda rows, labels: each(rows, labels).mean(),
    "column of each": lambda rows, labels: each(rows, labels)[:, None].mean(),
    "focal": focal,
    "masked": lambda rows, labels: (each(rows, labels) * (labels.flatten() != -100)).sum() / (labels != -100).sum(),
    "picked": lambda rows, labels: of_picked(rows, labels.flatten(), labels.flatten() >= 0),
    "smoothed": lambda rows, labels: each(rows, labels, label_smoothing=0.1).mean(),
    "nll of each": lambda rows, labels: F.nll_loss(F.log_softmax(rows, -1), labels.flatten(), reduction="none").mean(),
    "weights of each": lambda rows, labels: each(rows, labels, weight=WEIGHTS).mean(),
    "shares": of_some,
    "shares by default": with_default,
    "no shares": with_default,
    "module": Flat(nn.CrossEntropyLoss()),
    "module with weights": Flat(nn.CrossEntropyLoss(weight=WEIGHTS)),
    "binary with weights": Flat(nn.BCEWithLogitsLoss(weight=WEIGHTS), one_hot=True),
    "binary with weights of positives": Flat(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), one_hot=True),
    "probabilities": lambda rows, labels: F.cross_entropy(
        rows, (rows.detach() + labels.flatten()[:, None]).softmax(-1), WEIGHTS, label_smoothing=0.1
    ),
    "weights and smoothed": lambda rows, labels: F.cross_entropy(rows, labels.flatten(), WEIGHTS, label_smoothing=0.1),
    "nll with weights": lambda rows, labels: F.nll_loss(
        rows - rows.logsumexp(-1, keepdim=True), labels.flatten(), WEIGHTS
    ),
    "scaled": lambda rows, labels: (rows * WEIGHTS).square().mean() + 0 * labels.sum(),
}


def batch(name: str, samples: int = BATCH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, CLASSES, (samples, LENGTH), generator=generator) for _ in range(2))
    labels[torch.rand(samples, LENGTH, generator=generator) < torch.linspace(0, 1, samples)[:, None]] = -100
    shares = torch.rand(samples, LENGTH, generator=generator, dtype=torch.float64)
    return (ids, labels, shares) if name.startswith("shares") else (ids, labels)


@cache
def made(name: str) -> tuple[Rows, Captured]:
    torch.manual_seed(0)
    model = Rows().double()
    return model, capture(model, batch(name), loss_fn=LOSSES[name])


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_has_the_loss_and_its_gradients_for_any_batch(name: str) -> None:
    model, captured = made(name)
    model = copy.deepcopy(model)
    assert "b" in captured.hints
    ids, *targets = batch(name, BATCH + 4)
    loss = LOSSES[name](model(ids), *targets)
    loss.backward()
    weights = {name: value.detach() for name, value in model.named_parameters()} | captured.constants
    got = train_step(
        lift(captured.gm), weights, dict(zip(captured.input_names, (ids, *targets), strict=True)), training=True
    )
    torch.testing.assert_close(got["output"]["loss"], loss.detach())
    for key, value in model.named_parameters():
        torch.testing.assert_close(got["gradient"][key], value.grad)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("masked", "megatron"),
        ("picked", "megatron"),
        ("picked", "1f1b"),
        ("focal", "random 0"),
        ("module with weights", "ddp"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in LOSSES
            for how in ("ddp", "megatron", "zero3", "random 1")
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    model, captured = made(name)
    who = Subject(name, "train", captured, model.state_dict())
    plan = by_stages(who, (1,), "single", 2, 4, how) if how == "1f1b" else planned(who, (2,), how)
    report = verify(
        case_of(captured, plan, who.weights, dict(zip(captured.input_names, batch(name), strict=True))), ranks=living(2)
    )
    assert report.ok, (report.first, report.worst)
