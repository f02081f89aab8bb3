"""A request to capture: the checked arguments of `capture`, with inputs on meta. Made by capture.capture."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture import dims
from autopar.capture.dims import Dims
from autopar.capture.hooks import refuse_hooks
from autopar.capture.outside import Outside, is_plain_object
from autopar.capture.shadow import WithLoss, shadow
from autopar.capture.targets import count_targets, refuse_trained
from autopar.capture.wrapped import refuse_wrapped
from autopar.errors import CaptureError
from autopar.frontend import max_positions


@dataclass(frozen=True, eq=False)
class Asked:
    """What is to be captured.

    model    the user's model, in the dtype of activations
    rests    the model in the dtypes of its stored weights (mixed precision); None where these are the same
    outside  what the code of the model and of the loss function finds outside of them
    mode     "train" or "inference"
    inputs   positional inputs, on meta, of which the last `targets` go to `loss_fn`
    named    keyword inputs, on meta
    dims     the symbolic dims of the inputs
    notes    notes for the user on these"""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    mode: str
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    targets: int
    dims: Dims
    notes: tuple[str, ...]
    rests: nn.Module | None
    outside: Outside

    @staticmethod
    def of(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_fn: Callable[..., torch.Tensor] | None,
        mode: str,
        dynamic_shapes: Any,
        rests: nn.Module | None,
    ) -> Asked:
        """The request that the arguments of `capture` make. Raises CaptureError for models, loss functions and inputs
        that cannot be captured."""
        refuse_wrapped(model)
        refuse_trained(loss_fn)
        targets = count_targets(loss_fn, model, len(args), kwargs)
        _check_inputs(model, args, kwargs, targets, with_loss=loss_fn is not None)
        if mode == "train":
            refuse_hooks(model)
        inputs, named = _to_meta(args), _to_meta(dict(kwargs))
        flat = pytree.tree_leaves((inputs, named))
        outside = Outside(model, *([] if loss_fn is None else [loss_fn]))
        made = Asked(model, loss_fn, mode, tuple(inputs), named, targets, Dims(), (), rests, outside)
        if dynamic_shapes is not None:
            signature = inspect.signature(made.with_loss(model).forward)
            return replace(made, dims=dims.explicit(flat, dynamic_shapes, made.inputs, named, signature))
        note = dims.unshared(flat)
        return replace(made, dims=dims.find(flat, max_positions(model)), notes=(note,) if note else ())

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    def stand_ins(self, known: Dims, *, targets: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of the model, with or without targets, at stand-in sizes, which differ between symbols."""
        flat, tree = pytree.tree_flatten((self.inputs, self.named))
        args, kwargs = pytree.tree_unflatten(known.stand_ins(flat), tree)
        return tuple(args if targets else args[: len(args) - self.targets]), kwargs

    def fresh(self, twin: nn.Module) -> nn.Module:
        """A shadow of `twin`, which finds outside of it what the first one found."""
        self.outside.put_back()
        return shadow(twin)

    def with_loss(self, twin: nn.Module) -> nn.Module:
        """`twin`, a copy of the model, with a copy of the loss function applied to its outputs, if there is one."""
        if self.loss_fn is None:
            return twin
        held = isinstance(self.loss_fn, nn.Module) or is_plain_object(self.loss_fn)
        loss_fn = copy.deepcopy(self.loss_fn) if held else self.loss_fn
        return WithLoss(twin, loss_fn, self.targets, len(self.inputs) - self.targets)


def _check_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: int, *, with_loss: bool
) -> None:
    """Raise CaptureError where the inputs do not fit the signature of forward, followed by `targets` inputs of the loss
    function, if there is one (`with_loss`)."""
    signature = inspect.signature(model.forward)
    got = f"got {len(args)} positional input{'s' * (len(args) != 1)}" + (f" and {', '.join(kwargs)}" if kwargs else "")
    if len(args) < targets:
        raise CaptureError(f"{type(model).__name__}: {got}, wanted those of the model and, last, {targets} for loss_fn")
    try:
        signature.bind(*args[: len(args) - targets], **kwargs)
    except TypeError as error:
        last = "the last one goes" if targets == 1 else f"the last {targets} go"
        taken = f", of which {last} to loss_fn" if targets else ", none of which loss_fn takes" if with_loss else ""
        raise CaptureError(
            f"{type(model).__name__} does not take these inputs: {error}; {got}{taken}, wanted forward{signature}: "
            "give that in example_inputs (on the command line: in the args, or kwargs, that the factory returns)"
        ) from None


def _to_meta(tree: Any) -> Any:
    """The tree with its tensors on meta."""
    return pytree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, tree)
