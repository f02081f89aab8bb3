"""How many of the inputs go to the loss function, and what loss functions may not have."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.targets import count_targets
from autopar.errors import CaptureError

WIDTH = 4


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x


class Any(nn.Module):
    def forward(self, *inputs):
        return inputs[0]


def one(out, y):
    return out


def some(out, y, weight=None):
    return out


def rest(out, *targets):
    return out


def keyword(out, y, *, scale=1.0):
    return out


@pytest.mark.parametrize(
    ("loss", "model", "given", "kwargs", "wanted"),
    [
        (None, nn.Linear(1, 1), 1, {}, 0),
        (lambda out: out, nn.Linear(1, 1), 1, {}, 0),
        (one, nn.Linear(1, 1), 2, {}, 1),
        (keyword, nn.Linear(1, 1), 2, {}, 1),
        (some, nn.Linear(1, 1), 2, {}, 1),
        (some, nn.Linear(1, 1), 3, {}, 2),
        (some, nn.Linear(1, 1), 4, {}, 2),
        (some, Masked(), 2, {}, 1),
        (some, Masked(), 3, {"mask": 0}, 2),
        (some, Any(), 3, {}, 1),
        (rest, nn.Linear(1, 1), 3, {}, 2),
        (rest, nn.Linear(1, 1), 1, {}, 0),
        (F.cross_entropy, nn.Linear(1, 1), 2, {}, 1),
        (F.cross_entropy, Masked(), 2, {}, 1),
        (nn.MSELoss(), nn.Linear(1, 1), 2, {}, 1),
        (functools.partial(some, weight=1), nn.Linear(1, 1), 2, {}, 1),
    ],
)
def test_targets_are_what_the_loss_takes_and_the_model_does_not(loss, model, given, kwargs, wanted):
    assert count_targets(loss, model, given, kwargs) == wanted


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.MSELoss(), "target"),
        (lambda out, wanted: F.mse_loss(out, wanted), "wanted"),
        (lambda out, *wanted: F.mse_loss(out, *wanted), "wanted"),
    ],
)
def test_inputs_have_the_names_of_the_loss(loss, name):
    captured = capture(nn.Linear(WIDTH, WIDTH), (torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)), loss_fn=loss)
    assert captured.input_names == ("input", name)


class Centre(nn.Module):
    """What is left of a distance to the centre of the batches before."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.steps = how, 0
        self.register_buffer("centre", torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=how == "trains")

    def forward(self, out: Tensor) -> Tensor:
        loss = ((out - self.centre) * self.scale).square().mean()
        self.steps += 1
        if self.how == "counts" and self.steps > 100:
            loss = loss * 2.0
        if self.how == "assigns":
            self.centre = self.centre * 0.9 + out.detach().mean(0)
        if self.how == "in place":
            self.centre.mul_(0.9).add_(out.detach().mean(0))
        return loss


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("trains", r"loss_fn Centre has parameters that train \(scale\).*make it a part of the model"),
        ("assigns", "loss_fn Centre changes its buffer centre.*make it a part of the model"),
        ("counts", r"it counts its steps \(loss_fn.steps\), and a later one computes something else"),
        ("in place", "changes constant .* in place .*a buffer of loss_fn"),
    ],
)
def test_a_loss_has_nothing_that_changes(how, why):
    loss = Centre(how)
    with pytest.raises(CaptureError, match=why):
        capture(nn.Linear(WIDTH, WIDTH), (torch.zeros(2, WIDTH),), loss_fn=loss)
    assert torch.equal(loss.centre, torch.ones(WIDTH)) and loss.steps == 0


def test_a_loss_that_does_not_change_may_have_buffers_and_frozen_weights():
    captured = capture(nn.Linear(WIDTH, WIDTH), (torch.zeros(2, WIDTH),), loss_fn=Centre("stays"))
    assert (
        all(torch.equal(value, torch.ones(WIDTH)) for value in captured.constants.values())
        and len(captured.constants) == 2
    )


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out, y: (out - y) ** 2, r"got outputs loss float32\[b, 4\], outputs .*: loss_fn wants to return one"),
        (lambda out: out.sum(), "got 2 positional inputs, none of which loss_fn takes, wanted forward"),
    ],
)
def test_a_loss_function_of_another_form(loss, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(nn.Linear(4, 4), (torch.zeros(8, 4), torch.zeros(8, 4)), loss_fn=loss)
