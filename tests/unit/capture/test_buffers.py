"""Buffers that forward changes, however that is spelled, hold afterwards what the model's hold; what changes behind
autograd's back is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture, lift
from autopar.capture.precision import capture_in
from autopar.errors import CaptureError
from autopar.verify.reference import train_step
from passes import facts

WIDTH = 4


class Centred(nn.Module):
    """A map of what is near the centre of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x)).tanh()

    def change(self, y: Tensor) -> Tensor:
        return y


class Blocks(nn.Module):
    """Blocks of one class, one behind the other, and the mean of what they give."""

    def __init__(self, kind: type[Centred], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(kind: type[Centred], count: int) -> nn.Module:
    """So many blocks; with none the block is the model."""
    return (
        Blocks(kind, count)
        if count
        else type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x).square().mean()})()
    )


def same(model: nn.Module) -> None:
    """The graph of `model` gives its loss, its gradients and its buffers, in the first step and in the second."""
    x = torch.randn(8, WIDTH)
    captured, model, x = capture(model, (x,)), copy.deepcopy(model).double(), x.double()
    for _ in range(2):
        before = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
        got = train_step(lift(captured.gm), before, {"x": x}, training=True)
        model.zero_grad()
        loss = model(x)
        loss.backward()
        torch.testing.assert_close(got["output"]["loss"], loss.detach())
        for kind, wanted in (
            ("gradient", {name: p.grad for name, p in model.named_parameters() if p.requires_grad}),
            (
                "buffer",
                {
                    name: value
                    for name, value in (*model.named_parameters(), *model.named_buffers())
                    if not value.requires_grad
                },
            ),
        ):
            for name, value in wanted.items():
                torch.testing.assert_close(
                    got[kind].get(name, before[name]), value, msg=lambda text, name=name: f"{name}: {text}"
                )


class CopiesWhatChangesLater(Centred):
    def change(self, y):
        mean = y.detach().mean(0)
        self.centre.copy_(mean)
        mean.mul_(2)
        return y - mean


class CopiesWhatWasBefore(Centred):
    def change(self, y):
        mean = y.detach().mean(0)
        y = y - self.centre
        self.centre.copy_(mean)
        return y


class AddsWithoutGradients(Centred):
    def change(self, y):
        with torch.no_grad():
            self.centre += y.mean(0)
        return y


class AssignsData(Centred):
    def change(self, y):
        self.centre.data = self.centre.data * 0.9 + y.detach().mean(0) * 0.1
        return y - self.centre


class AssignsDataUnread(Centred):
    def change(self, y):
        self.centre.data = self.centre * 0.9 + y.mean(0)
        return y


class Assigns(Centred):
    def change(self, y):
        self.centre = self.centre * 0.9 + y.detach().mean(0) * 0.1
        return y - self.centre


class AssignsUnread(Centred):
    def change(self, y):
        self.centre = self.centre * 0.9 + y.detach().mean(0) * 0.1
        return y


class AssignsAndReadsBefore(Centred):
    def change(self, y):
        before = self.centre
        self.centre = before * 0.9 + y.detach().mean(0) * 0.1
        return y - before


class AssignsWhatHasGradients(Centred):
    def change(self, y):
        self.centre = y.mean(0)
        return y - self.centre


class AssignsTwice(Centred):
    def change(self, y):
        self.centre = self.centre.clone()
        self.centre.mul_(0.5)
        self.centre = self.centre + y.detach().mean(0)
        return y - self.centre


ASSIGNING = [Assigns, AssignsUnread, AssignsAndReadsBefore, AssignsWhatHasGradients, AssignsTwice]


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize(
    "kind",
    [CopiesWhatChangesLater, CopiesWhatWasBefore, AddsWithoutGradients, AssignsData, AssignsDataUnread, *ASSIGNING],
)
def test_what_is_changed_holds_what_it_does_in_the_model(kind: type[Centred], count: int) -> None:
    same(made(kind, count))


class ScalesBehindAutograd(Centred):
    def change(self, y):
        with torch.no_grad():
            y.mul_(2)
        return y


class ClampsPartBehindAutograd(Centred):
    def change(self, y):
        with torch.no_grad():
            y[2:].clamp_(-1, 1)
        return y


class ScalesDetached(Centred):
    def change(self, y):
        y.detach().mul_(2)
        return y


class ScalesData(Centred):
    def change(self, y):
        y.data.mul_(2)
        return y


class AssignsDataOfValues(Centred):
    def change(self, y):
        y.data = y.data.clamp(-1, 1)
        return y


class ChangesItsOwnWithoutGradients(Centred):
    def change(self, y):
        with torch.no_grad():
            scaled = y * 2
            scaled.mul_(2)
            scaled[1:].data.add_(1)
        return y - scaled


class ClampsATarget(Centred):
    def change(self, y):
        target = (y * 2).detach()
        target.clamp_(-1, 1)
        return y - target


def refused(kind: type[Centred], why: str) -> None:
    """Capture refuses a model, and says where and why."""
    with pytest.raises(CaptureError, match=rf"test_buffers.py:\d+.*{why}"):
        capture(Blocks(kind, 1), (torch.randn(8, WIDTH),))


@pytest.mark.parametrize(
    "kind", [ScalesBehindAutograd, ClampsPartBehindAutograd, ScalesDetached, ScalesData, AssignsDataOfValues]
)
def test_values_that_change_without_their_gradients_are_refused(kind: type[Centred]) -> None:
    refused(kind, "holds, without gradients, and gradients of it flow later")


@pytest.mark.parametrize("kind", [ChangesItsOwnWithoutGradients, ClampsATarget])
def test_what_has_no_gradients_may_change_so(kind: type[Centred]) -> None:
    same(Blocks(kind, 4))


class Momentum(Centred):
    """As MoCo: a second map that follows the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    @torch.no_grad()
    def change(self, y):
        for leading, following in zip(self.linear.parameters(), self.follower.parameters(), strict=True):
            following.data = following.data * 0.9 + leading.data * 0.1
        return y


class ReadsFollower(Momentum):
    def change(self, y):
        super().change(y)
        return y + self.follower(y)


class FollowsInTraining(Momentum):
    def change(self, y):
        if self.training:
            super().change(y)
        return y


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("kind", [Momentum, ReadsFollower])
def test_weights_that_do_not_train_are_changed_as_buffers_are(kind: type[Centred], count: int) -> None:
    same(made(kind, count))


def test_it_is_said_that_changed_weights_are_buffers() -> None:
    notes = capture(Blocks(Momentum, 4), (torch.randn(8, WIDTH),)).notes
    assert any(
        note.startswith(
            "blocks.0.follower.weight, blocks.0.follower.bias, blocks.1.follower.weight, ... do not train, and "
            "forward changes them: buffers"
        )
        for note in notes
    ), notes


def test_changed_weights_keep_their_dtype_under_mixed_precision() -> None:
    captured, _ = capture_in(Blocks(Momentum, 4), (torch.randn(8, WIDTH),), {}, precision="bf16", mode="train")
    (body,) = (module for module in captured.gm.children() if isinstance(module, fx.GraphModule))
    assert {
        node.meta["fqn"]: facts.dtype(node)
        for node in body.graph.nodes
        if node.meta.get("role") == "buffer" and "follower" in node.meta["fqn"]
    } == {"follower.weight": torch.float32, "follower.bias": torch.float32}


class AssignsTrained(Momentum):
    @torch.no_grad()
    def change(self, y):
        self.linear.weight.data = self.linear.weight.data * 0.9
        return y


def test_parameters_that_train_and_are_assigned_are_refused() -> None:
    refused(AssignsTrained, r"changes param blocks.0.linear.weight in place .*; only buffers may change in forward")


class Grows(Centred):
    def change(self, y):
        self.centre.data = torch.cat([self.centre, y.detach().mean(0)])
        return y


def test_data_of_another_size_is_refused() -> None:
    refused(Grows, r"assigns float32\[8\] to the data of a tensor of float32\[4\]")


class AssignsInTraining(Centred):
    def change(self, y):
        if self.training:
            self.centre = self.centre * 0.9 + y.detach().mean(0) * 0.1
        return y


class AddsToPart(Centred):
    def change(self, y):
        self.centre[1:3].add_(y.detach().mean(0)[1:3])
        return y


class AddsToView(Centred):
    def change(self, y):
        self.centre.view(2, 2).add_(y.detach().mean(0).view(2, 2))
        return y


class AddsToData(Centred):
    def change(self, y):
        self.centre.data.add_(y.detach().mean(0))
        return y


class AddsToDataInTraining(Centred):
    def change(self, y):
        if self.training:
            self.centre.data.add_(y.detach().mean(0))
        return y


FOLLOWER = ("blocks.0.follower.weight", "blocks.0.follower.bias")


@pytest.mark.parametrize(
    ("kind", "changing"),
    [
        (AssignsInTraining, ()),
        (AddsToDataInTraining, ()),
        (FollowsInTraining, ()),
        (Momentum, FOLLOWER),
        *((kind, ("blocks.0.centre",)) for kind in (AssignsUnread, AddsToPart, AddsToView, AddsToData)),
    ],
)
def test_evaluation_changes_what_it_assigns(kind: type[Centred], changing: tuple[str, ...]) -> None:
    evaluation = capture(Blocks(kind, 1), (torch.randn(8, WIDTH),)).evaluation
    assert evaluation.why == "" and evaluation.changing == changing and evaluation.differs == (not changing)


class Observes(Centred):
    """An operator in place whose first operand is not what it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()

    def change(self, y):
        made = self.quantized
        seen = made.activation_post_process
        return torch.ops.aten.fused_moving_avg_obs_fake_quant(
            y,
            made.observer_enabled,
            made.fake_quant_enabled,
            seen.min_val,
            seen.max_val,
            made.scale,
            made.zero_point,
            0.01,
            0,
            255,
            -1,
        )


def test_operators_that_change_others_beside_their_result_are_refused() -> None:
    refused(
        Observes,
        r"\S+ changes running_min, running_max, scale, zero_point beside what it gives, .*copy these into buffers",
    )
