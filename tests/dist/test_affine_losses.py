"""Losses that add to a mean over samples what no sample is in: penalties of weights, learned uncertainties, numbers.
Each counts once per step, however many microbatches there are, and so do its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.pipeline import SCHEDULES
from autopar.recipes import roles
from tests.helpers.verify import Sizes, Subject, by_chance, by_stages

D, IGNORED = 8, -100


Loss = Callable[["Model", Tensor, Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Blocks of one kind, of which each has a penalty, and a loss `of` the model, logits, labels, inputs and these."""

    def __init__(self, of: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))
        self.head, self.doubt, self.other = (
            nn.Linear(D, D),
            nn.Parameter(torch.tensor(0.3)),
            nn.Parameter(torch.tensor(-0.2)),
        )
        self.register_buffer("shares", torch.linspace(0.1, 2, D))
        self._of = of

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h, penalty = x, self.doubt.square()
        for layer in self.layers:
            h = layer(h)
            penalty = penalty + layer[0].weight.abs().mean()
        return self._of(self, self.head(h), labels, x, penalty)


def _entropy(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _sum(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _similarity(z: Tensor, x: Tensor) -> Tensor:
    return F.cosine_similarity(z, x, dim=-1)


AFFINE: dict[str, Loss] = {
    "weight penalty": lambda model, z, labels, x, penalty: (
        _entropy(z, labels) + 1e-1 * sum(p.pow(2).sum() for p in model.layers.parameters())
    ),
    "penalty of each block": lambda model, z, labels, x, penalty: _entropy(z, labels) + penalty / 3,
    "learned uncertainties": lambda model, z, labels, x, penalty: (
        (-model.doubt).exp() * _entropy(z, labels)
        + model.doubt
        + (-model.other).exp() * F.mse_loss(z, x) / 2
        + model.other
    ),
    "1 - mean": lambda model, z, labels, x, penalty: 1 - _similarity(z, x).mean(),
    "dice": lambda model, z, labels, x, penalty: (
        1 - ((2 * (z.sigmoid() * x).sum((1, 2)) + 1) / (z.sigmoid().sum((1, 2)) + x.square().sum((1, 2)) + 1)).mean()
    ),
    "weights of classes": lambda model, z, labels, x, penalty: (
        penalty / 3
        + F.cross_entropy(z.flatten(0, 1), labels.flatten(), model.shares, ignore_index=IGNORED, label_smoothing=0.1)
    ),
    "probabilities": lambda model, z, labels, x, penalty: (
        penalty / 3 + F.cross_entropy(z.flatten(0, 1), x.flatten(0, 1).softmax(-1), model.shares, label_smoothing=0.1)
    ),
    "weights of positives": lambda model, z, labels, x, penalty: (
        penalty / 3 + F.binary_cross_entropy_with_logits(z, x.sigmoid(), pos_weight=model.shares)
    ),
    "number": lambda model, z, labels, x, penalty: 2 * (_entropy(z, labels) - 1.5) + 1,
    "totals": lambda model, z, labels, x, penalty: (
        _sum(z, labels) / (count := (labels != IGNORED).to(z.dtype).sum()) + model.doubt * count / 100
    ),
}

COUPLED: dict[str, Loss] = {
    "square of a mean": lambda model, z, labels, x, penalty: (_entropy(z, labels) + 1).square(),
    "log of a mean": lambda model, z, labels, x, penalty: 1 - _similarity(z, x).mean().abs().log(),
    "dice of the batch": lambda model, z, labels, x, penalty: (
        1 - (2 * (z.sigmoid() * x).sum() + 1) / (z.sigmoid().sum() + x.square().sum() + 1)
    ),
    "penalty of weights and samples": lambda model, z, labels, x, penalty: (
        _entropy(z, labels) + (z.mean() + model.doubt).square()
    ),
}


class Labelled(Subject):
    """A subject whose batch is rows and labels, of which samples have different numbers that count."""

    def batch(self, batch: int = 8, seq: int = 4) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(1)
        labels = torch.randint(0, D, (batch, 4), generator=random)
        labels[torch.arange(4)[None] > torch.arange(batch)[:, None] % 4] = IGNORED
        return dict(zip(self.captured.input_names, (torch.randn(batch, 4, D, generator=random), labels), strict=True))


@cache
def labelled(name: str) -> Labelled:
    model = Model({**AFFINE, **COUPLED}[name])
    captured = capture(model, (torch.zeros(8, 4, D), torch.zeros(8, 4, dtype=torch.long)))
    return Labelled(name, "train", captured, model.state_dict())


@pytest.mark.parametrize(
    ("schedule", "mesh", "used", "microbatches"),
    [
        ("1f1b", (1,), roles.nothing, 4),
        ("interleaved_zero_bubble", (2,), roles.zero1, 4),
        ("gpipe", (1,), roles.nothing, 8),
    ],
)
@pytest.mark.parametrize("name", AFFINE)
def test_what_no_sample_is_in_counts_once(
    name: str, schedule: str, mesh: Sizes, used: roles.Role, microbatches: int
) -> None:
    who = labelled(name)
    made = by_stages(who, mesh, (used,), 2, microbatches, schedule, SCHEDULES[schedule].virtual or 1)
    report = who.verified(made)
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])
    assert made.shared


@pytest.mark.parametrize("name", AFFINE)
def test_the_graph_is_the_model(name: str) -> None:
    who, model = labelled(name), Model(AFFINE[name]).double()
    batch = who.batch()
    made = by_stages(who, (1,), (roles.nothing,), 2, 4, "1f1b")
    wanted, weights = (
        model(*(x.double() if x.is_floating_point() else x for x in batch.values())),
        dict(model.named_parameters()),
    )
    wanted.backward()
    found = who.case(made).reference()
    assert float(found["output"]["loss"]) == pytest.approx(float(wanted.detach()), abs=1e-12)
    for key, grad in found["gradient"].items():
        weight = weights[key]
        torch.testing.assert_close(
            grad, torch.zeros_like(weight) if weight.grad is None else weight.grad, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", AFFINE)
def test_any_plan(name: str, seed: int) -> None:
    report = labelled(name).verified(by_chance(labelled(name), (2, 2), seed))
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="use one microbatch, or a model whose loss is a sum or mean over samples"):
        by_stages(labelled(name), (1,), (roles.nothing,), 2, 4, "1f1b")
