"""The arguments of a loss function beyond the model's outputs: its targets, which are the last positional inputs. And
whether the loss trains anything. Called by asked and precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.errors import CaptureError
from passes.grads import needs_grad

PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def target_names(loss_fn: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a loss function after the outputs, `*targets` as one; none for a built-in without
    a signature."""
    return [p.name for p in _parameters(loss_fn) if p.kind in (*PLACED, inspect.Parameter.VAR_POSITIONAL)][1:]


def count_targets(
    loss_fn: Callable[..., torch.Tensor] | None, model: nn.Module, given: int, kwargs: Mapping[str, Any]
) -> int:
    """How many of the `given` positional inputs go to the loss function: all its targets, or, where their number is
    open (defaults, `*targets`), the inputs that the model does not take."""
    if loss_fn is None:
        return 0
    taken = _parameters(loss_fn)
    placed = [p for p in taken if p.kind in PLACED]
    least = max(0, sum(p.default is p.empty for p in placed) - 1)
    most = (
        given
        if len(placed) < len(taken) and any(p.kind is p.VAR_POSITIONAL for p in taken)
        else max(least, len(placed) - 1)
    )
    own = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in own):
        return least
    return min(max(given - sum(p.kind in PLACED and p.name not in kwargs for p in own), least), most)


def refuse_trained(loss_fn: Callable[..., Any] | None) -> None:
    """Raise CaptureError where a loss function has weights of its own that train: they would be constants."""
    names = (
        [name for name, weight in loss_fn.named_parameters() if weight.requires_grad]
        if isinstance(loss_fn, nn.Module)
        else []
    )
    if names:
        raise CaptureError(
            f"loss_fn {type(loss_fn).__name__} has parameters that train ({', '.join(names[:3])}), and parameters are "
            "the model's: make it a part of the model, which then gives the loss, or let them have requires_grad=False"
        )


def _parameters(loss_fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a loss function; `*args` for a built-in without a signature."""
    try:
        return list(
            inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters.values()
        )
    except ValueError:  # built-in functions need not say
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def refuse_untrained(gm: fx.GraphModule, model: nn.Module) -> None:
    """Raise CaptureError where the loss depends on no trained weight of `model`: a training step would fail in autograd
    on every rank."""
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    losses: list[Any] = [
        node for node, entry in zip(output.args[0], gm.meta["outputs"], strict=True) if entry["kind"] == "loss"
    ]
    if any(needs_grad(gm)[loss] for loss in losses):
        return
    wanting = [name for name, p in model.named_parameters() if p.requires_grad]
    why = (
        f"it is computed of none of those that want one ({', '.join(wanting[:3])}{', ...' if wanting[3:] else ''}), or "
        "through detach() or whole numbers alone"
        if wanting
        else "none wants one (requires_grad); thaw what is to be trained before the model is compiled"
        if list(model.parameters())
        else "it has none"
    )
    raise CaptureError(
        f"no weight of {type(model).__name__} has a gradient of its loss: {why}. There is nothing to train; for a "
        "forward alone plan it with mode='inference'"
    )
