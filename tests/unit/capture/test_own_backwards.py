"""Backwards that people write themselves, and hooks of gradients: what is captured has the model's gradients, or
nothing is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.verify import graph_rows
from tests.helpers.own_functions import AS_AUTOGRAD, KEPT, REFUSED, Calling, CountsBackwards, batch

detach = torch.ops.aten.detach.default


def calling(body: Callable[[Tensor, Tensor], Tensor]) -> Calling:
    torch.manual_seed(0)
    return Calling(body)


def detached(gm: nn.Module) -> list[torch.fx.Node]:
    return [
        n
        for part in gm.modules()
        if isinstance(part, torch.fx.GraphModule)
        for n in part.graph.nodes
        if n.target is detach
    ]


@pytest.mark.parametrize("name", [*KEPT, *AS_AUTOGRAD])
def test_gradients_of_the_graph_are_those_of_the_model(name: str) -> None:
    model = calling((KEPT | AS_AUTOGRAD)[name])
    captured = capture(model, batch())
    assert any("keeps its own backward (own_functions.py:" in note for note in captured.notes) is (name in KEPT), (
        captured.notes
    )
    assert bool(detached(captured.gm)) is (name in KEPT), "what autograd does right costs nothing"
    for samples in (8, 6):
        rows, notes = graph_rows(model, captured, batch(samples), {}, training=True)
        assert not notes and max(row.error for row in rows) < 1e-5, rows
        assert sum(row.name.startswith("gradient of") for row in rows) == len(list(model.parameters()))


@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_that_cannot_be_kept_is_refused(name: str) -> None:
    body, why = REFUSED[name]
    with pytest.raises(CaptureError, match=why) as caught:
        capture(calling(body), batch())
    assert "own_functions.py:" in str(caught.value) and "torch.library.custom_op" in str(caught.value)


def test_a_backward_that_changes_what_it_is_given_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"CountsBackwards \(test_own_.* changes .* \(argument 1\) in its backward"):
        capture(calling(lambda h, w: CountsBackwards.apply(h @ w, torch.zeros(()))), batch())


@pytest.mark.parametrize("name", ["clipped", "straight through"])
def test_without_training_no_backward_is_tried(name: str) -> None:
    captured = capture(calling((KEPT | {n: body for n, (body, _) in REFUSED.items()})[name]), batch(), mode="inference")
    assert not captured.notes and not detached(captured.gm)


def test_what_needs_no_gradient_is_not_tried() -> None:
    class Reading(Calling):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(REFUSED["clipped"][0](x, torch.eye(8)), y)

    assert not capture(Reading(AS_AUTOGRAD["lean"]), batch()).notes


class Quiet(Function):
    """Looks at its input without gradients, as checkpoints do: in a trace nothing says where that ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, least: float = 0.5) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean().clamp(min=least)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


@pytest.mark.parametrize(
    "body",
    [
        lambda h, w: Quiet.apply(h @ w),
        lambda h, w: h + Quiet.apply(w.detach().abs(), 0.1).mean() * (h @ w),
        lambda h, w: h + checkpoint(lambda x: (x @ w).tanh(), h, use_reentrant=True),
        lambda h, w: h + checkpoint(lambda x: (x @ w).tanh(), h.detach(), use_reentrant=True),
        lambda h, w: h + checkpoint(lambda x: (x @ w).tanh(), h, use_reentrant=False),
    ],
    ids=[
        "a scale",
        "a scale of what has no gradient",
        "re-entrant checkpoint",
        "that nobody asks gradients of",
        "checkpoint",
    ],
)
def test_what_comes_behind_a_function_has_gradients(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = calling(body)
    rows, notes = graph_rows(model, capture(model, batch()), batch(), {}, training=True)
    assert not notes and max(row.error for row in rows) < 1e-5, rows
    assert all(weight.grad is None for weight in model.parameters())


def test_a_function_is_as_before_afterwards() -> None:
    before = torch.autograd.Function.apply
    with pytest.raises(CaptureError):
        capture(calling(REFUSED["clipped"][0]), batch())
    assert torch.autograd.Function.apply == before


class Hooked(Calling):
    """Turns a gradient round on the way."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](x)
        if h.requires_grad:
            h.register_hook(lambda grad: -grad)
        return ((h - y) ** 2).mean()


class HooksANode(Calling):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](x)
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda grads: (-grads[0],))
        return ((h - y) ** 2).mean()


class HooksWhatIsSaved(Calling):
    """As compressed activations do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
            return super().forward(x, y)


class KeepsOnTheHost(Calling):
    """Where the backward reads what was saved."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x, y)


class Freezes(Calling):
    """The weights of one of two calls of a block."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](x)
        self.layers[0].requires_grad_(False)
        h = self.layers[0](h)
        self.layers[0].requires_grad_(True)
        return ((h - y) ** 2).mean()


class FreezesByFlag(Calling):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.layers[0].w
        weight.requires_grad = False
        loss = super().forward(x, y)
        weight.requires_grad = True
        return loss


class SaysWhatIs(Calling):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.layers[0].requires_grad_(True)
        return super().forward(x, y)


class RunsABackward(Calling):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.layers[0](x).square().mean().backward()
        return super().forward(x, y)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HooksANode, "gives a node of autograd a backward hook"),
        (HooksWhatIsSaved, "changes what the backward reads"),
        (Freezes, "sets requires_grad of a weight to False in forward"),
        (FreezesByFlag, "sets requires_grad of a weight to False in forward"),
        (RunsABackward, "runs a backward in forward"),
    ],
)
def test_what_forward_does_to_the_backward_is_refused(kind: type[Calling], said: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_own_backwards.py:\d+ {said}"):
        capture(kind(AS_AUTOGRAD["lean"]), batch())


@pytest.mark.parametrize("kind", [KeepsOnTheHost, SaysWhatIs])
def test_what_changes_no_gradient_is_captured(kind: type[Calling]) -> None:
    assert capture(kind(AS_AUTOGRAD["lean"]), batch()).gm


class InfersFirst(Calling):
    """Features without gradients, and a map of them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            h = self.layers[0](x)
        return ((self.layers[1](h.clone()) - y) ** 2).mean()


class CopiesPart(Calling):
    """A copy has no gradients, nor does it hand any on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        target = copy.deepcopy(self.layers[0])
        for weight in target.parameters():
            weight.requires_grad_(False)
        return super().forward(x, target(y))


@pytest.mark.parametrize("kind", [InfersFirst, CopiesPart])
def test_what_is_computed_in_inference_mode_or_by_copies_has_no_gradients(kind: type[Calling]) -> None:
    torch.manual_seed(0)
    model = kind(AS_AUTOGRAD["lean"])
    rows, notes = graph_rows(model, capture(model, batch()), batch(), {}, training=True)
    assert not notes and all(row.ok for row in rows), rows


def test_hooks_of_the_backward_of_every_module_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, into, out: None)
    try:
        with pytest.raises(CaptureError, match=r"every module .* has a backward hook"):
            capture(Calling(AS_AUTOGRAD["lean"]), batch())
    finally:
        handle.remove()


def _on_module(model: nn.Module) -> None:
    model.layers[1].register_full_backward_hook(lambda module, into, out: None)  # type: ignore[operator, union-attr]


def _on_parameter(model: nn.Module) -> None:
    model.layers[1].w.register_hook(lambda grad: 0 * grad)  # type: ignore[operator, union-attr]


def _behind_accumulation(model: nn.Module) -> None:
    model.layers[1].w.register_post_accumulate_grad_hook(lambda weight: None)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("kind", "register", "where"),
    [
        (Hooked, lambda model: None, "test_own_backwards.py:"),
        (Calling, _on_module, "module layers.1"),
        (Calling, _on_parameter, "parameter layers.1.w"),
        (Calling, _behind_accumulation, "parameter layers.1.w"),
    ],
    ids=["in forward", "module", "parameter", "accumulated"],
)
def test_a_hook_of_the_backward_is_refused(
    kind: type[Calling], register: Callable[[nn.Module], None], where: str
) -> None:
    model = kind(AS_AUTOGRAD["lean"])
    register(model)
    with pytest.raises(CaptureError, match=f"{where}.*backward hook"):
        capture(model, batch())
    assert capture(model, batch(), mode="inference").gm
