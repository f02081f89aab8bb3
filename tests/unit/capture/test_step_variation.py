"""A graph has one step: models whose steps differ by what they keep are refused, caches are not."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError


class Keeping(nn.Module):
    """A squared error of what `keep` makes of a map; `kept` is what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps, self.ready = nn.Linear(4, 4), 0, False
        self.seen: list[int] = []
        self.kept: dict[Any, Any] = {}
        self.there = SimpleNamespace(count=0, mask=None)
        self.last: Any = 0.0
        self.random = random.Random(0)
        self.register_buffer("mean", torch.zeros(4))

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keep(self.linear(x)).square().mean()


class WarmsUp(Keeping):
    def keep(self, x):
        self.steps += 1
        return x * min(1.0, self.steps / 10)  # the line


class Lists(Keeping):
    def keep(self, x):
        self.seen.append(1)
        return x * len(self.seen)  # the line


class Decays(Keeping):
    def keep(self, x):
        self.kept["scale"] = self.kept.get("scale", 1.0) * 0.5
        return x * self.kept["scale"]  # the line


class Maps(Keeping):
    def keep(self, x):
        self.steps += 1
        return torch.vmap(lambda row: row * self.steps)(x)  # the line


class CutsAnother(Keeping):
    def keep(self, x):
        mask = self.kept.setdefault("mask", torch.arange(8.0, device=x.device))
        if self.ready:
            return x * mask[4:]  # the line
        self.ready = True
        return x * mask[:4]


class CountsElsewhere(Keeping):
    def keep(self, x):
        self.there.count += 1
        return x / self.there.count  # the line


class Clocks(Keeping):
    def keep(self, x):
        return x * time.perf_counter()  # the line


class DrawsByItself(Keeping):
    def keep(self, x):
        return x * self.random.random()  # the line


class Remembers(Keeping):
    def keep(self, x):
        x = x + self.last  # the line
        self.last = x.detach()
        return x


class BeginsOtherwise(Keeping):
    def keep(self, x):
        if not self.ready:
            self.ready = True
            return x - x.mean(0)
        return x * 2.0  # the line


class KeepsTheFirstBatch(Keeping):
    def keep(self, x):
        return x + self.kept.setdefault("first", x.detach())  # the line


class KeepsAnInput(Keeping):
    """One of whose steps uses the batch of the step before."""

    def forward(self, x):
        before, self.last = self.last if self.ready else x, x
        self.ready = True
        return (self.linear(x) * before).square().mean()  # the line


class KeepsADraw(Keeping):
    def keep(self, x):
        return x * self.kept.setdefault("noise", torch.randperm(4, device=x.device))  # the line


class BeginsWithTheFirstBatch(Keeping):
    """As ActNorm, in a buffer."""

    def keep(self, x):
        if not self.ready:
            self.mean, self.ready = x.detach().mean(0), True
        return x - self.mean  # the line


class KeepsOfABufferThatChanges(Keeping):
    def keep(self, x):
        self.mean.add_(1.0)
        return x * self.kept.setdefault("mean", self.mean.square())  # the line


class ReadsANumber(Keeping):
    """Which has no value when steps are compared."""

    def keep(self, x):
        self.steps += 1
        return x / x.detach().abs().max().item() * self.steps  # the line


class DropsMore(Keeping):
    """A rate is no part of what an evaluation is compared by."""

    def keep(self, x):
        self.steps += 1
        return nn.functional.dropout(x, min(0.5, self.steps / 1000))  # the line


class _Reversed(torch.autograd.Function):
    """Only its backward reads the factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class ReversesMore(Keeping):
    """As domain-adversarial training."""

    def keep(self, x):
        self.steps += 1
        return _Reversed.apply(x, min(1.0, self.steps / 1000))  # the line


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "kind",
    [
        DropsMore,
        ReversesMore,
        ReadsANumber,
        WarmsUp,
        Lists,
        Decays,
        Maps,
        CutsAnother,
        CountsElsewhere,
        Clocks,
        DrawsByItself,
        Remembers,
        BeginsOtherwise,
        KeepsTheFirstBatch,
        KeepsAnInput,
        KeepsADraw,
        BeginsWithTheFirstBatch,
        KeepsOfABufferThatChanges,
    ],
)
def test_steps_that_differ_are_refused_with_the_line(kind: type[Keeping], mode: str) -> None:
    model = kind()
    with pytest.raises(
        CaptureError,
        match=rf"{kind.__name__} cannot be captured: its second step .* from \w+ \(test_step_variation.py:(\d+)\) on",
    ) as caught:
        capture(model, (torch.randn(8, 4),), mode=mode)
    number = int(str(caught.value).split("test_step_variation.py:")[1].split(")")[0])
    with open(__file__) as file:
        assert "# the line" in file.read().splitlines()[number - 1]
    assert model.steps == model.there.count == 0 and not model.seen and not model.kept


class SwitchesLate(Keeping):
    def keep(self, x):
        self.steps += 1
        return x * 2.0 if self.steps > 100 else x  # the line


class SwitchesLateBefore(Keeping):
    def keep(self, x):
        scale = 2.0 if self.steps >= 100 else 1.0
        self.steps += 1
        return x * scale  # the line


class NowAndThen(Keeping):
    def keep(self, x):
        self.steps += 1
        if self.steps % 100 == 0:
            x = x - x.mean(0)
        return x * 2.0  # the line


class LeavesOut(Keeping):
    def keep(self, x):
        self.steps += 1
        if self.steps % 3:
            x = x - x.mean(0)
        return x * 2.0  # the line


class KeepsAMean(Keeping):
    """Of a buffer that it assigns, until it has warmed up."""

    def keep(self, x):
        self.steps += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x - self.mean if self.steps > 1000 else x.abs()  # the line


@pytest.mark.parametrize("kind", [SwitchesLate, SwitchesLateBefore, NowAndThen, LeavesOut, KeepsAMean])
def test_later_steps_that_differ_are_refused(kind: type[Keeping]) -> None:
    """Two steps in a row are alike. A branch on a count was the one of the first step for ever."""
    model = kind()
    with pytest.raises(CaptureError, match=rf"{kind.__name__} cannot be captured: it counts its steps \(steps\), and"):
        capture(model, (torch.randn(8, 4),))
    assert model.steps == 0


class Tells(Keeping):
    """Counts for its user, who reads it."""

    def keep(self, x):
        self.steps += 1
        self.seen.append(x.shape[0])
        self.last = x.detach().mean()
        return x


class MasksOnce(Keeping):
    def keep(self, x):
        if self.there.mask is None:
            self.there.mask = torch.arange(4, device=x.device) < 3
        return x * self.there.mask


class BuildsAMaskOnce(Keeping):
    def keep(self, x):
        if self.there.mask is None:
            self.there.mask = torch.zeros(4, device=x.device)
            self.there.mask[1:] = 1.0
        return x * self.there.mask


class KeepsOfABuffer(Keeping):
    """As tables of rotary embeddings, of frequencies."""

    def keep(self, x):
        return x + self.kept.setdefault("table", self.mean.cos())


class KeepsAView(Keeping):
    """Which sees what becomes of the weight."""

    def keep(self, x):
        return x @ self.kept.setdefault("view", self.linear.weight.data.t())


class OverwritesWhatItKeeps(Keeping):
    def keep(self, x):
        self.last = x.detach().exp()
        return x * self.last


class MasksBySize(Keeping):
    def keep(self, x):
        if x.shape[-1] not in self.kept:
            self.kept[x.shape[-1]] = torch.ones(x.shape[-1], device=x.device).cumsum(0)
        return x * self.kept[x.shape[-1]]


class LongestSoFar(Keeping):
    def keep(self, x):
        self.steps = max(self.steps, x.shape[-1])
        return x / self.steps


class CutsALongerMask(Keeping):
    """As ALiBi of x-transformers: what is made in the first step, later cut from what was made."""

    def keep(self, x):
        rows, columns = x.shape[-2] + 2, x.shape[-1]
        if "mask" not in self.kept:
            self.kept["mask"] = torch.arange(rows * columns, device=x.device).view(rows, columns)
            return x + self.kept["mask"][: x.shape[-2]]
        return x + self.kept["mask"][..., -rows:, -columns:].expand(rows, columns)[: x.shape[-2]]


class MasksBySamples(Keeping):
    def keep(self, x):
        shown = torch.vmap(torch.vmap(lambda row, i: row.sum() + i >= 0, (None, 0)), (0, None))(
            x, torch.arange(4, device=x.device)
        )
        return x * shown


class Averages(Keeping):
    def keep(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Drops(Keeping):
    def keep(self, x):
        return nn.functional.dropout(x, 0.5, self.training) * torch.rand(4, device=x.device)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "kind",
    [
        Tells,
        MasksOnce,
        BuildsAMaskOnce,
        KeepsOfABuffer,
        KeepsAView,
        OverwritesWhatItKeeps,
        MasksBySize,
        CutsALongerMask,
        MasksBySamples,
        LongestSoFar,
        Averages,
        Drops,
    ],
)
def test_what_is_kept_and_changes_no_step_is_captured(kind: type[Keeping], mode: str) -> None:
    assert capture(kind(), (torch.randn(8, 4),), mode=mode).hints == {"b": 8}


class KeepsOfAWeight(Keeping):
    def keep(self, x):
        return x * self.kept.setdefault("norm", self.linear.weight.detach().norm())


def test_what_is_kept_of_weights_is_another_one_where_these_train() -> None:
    """Not frozen ones, nor in inference."""
    with pytest.raises(CaptureError, match="its second step computes something else"):
        capture(KeepsOfAWeight(), (torch.randn(8, 4),))
    assert capture(KeepsOfAWeight(), (torch.randn(8, 4),), mode="inference").hints == {"b": 8}


class OrdersInTraining(Keeping):
    """As convolutions of diffusers, for DDP."""

    def keep(self, x):
        return torch.tanh(x.T.contiguous() if self.training else x.T)


def test_what_is_only_in_another_order_when_it_trains_evaluates_alike() -> None:
    evaluation = capture(OrdersInTraining(), (torch.randn(8, 4),)).evaluation
    assert evaluation.why == "" and not evaluation.differs


def test_a_model_whose_first_step_is_behind_it_is_captured() -> None:
    model = BeginsOtherwise()
    model(torch.randn(8, 4))
    assert capture(model, (torch.randn(8, 4),)).hints == {"b": 8}
