"""Backwards that people write themselves, and hooks of gradients: what is captured has the model's gradients, or
nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.verify import graph_rows
from tests.helpers.own_functions import AS_AUTOGRAD, KEPT, REFUSED, Calling, batch

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
