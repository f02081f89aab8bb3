"""A shadow of the user's model: the same structure on the meta device, so that nothing is copied, run or changed.
Called by capture.capture, and wherever a model runs without values.

`shadow(model, keep)` shares no tensor with the model. `keep` names containers and the children to keep of them, which
is how capture shortens runs of alike blocks: what is left out is never copied. Forward hooks are part of what a model
computes and come along; backward hooks cannot be captured and do not (`capture.hooks` refuses them in models that
train).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.closures import closures_copied
from autopar.capture.targets import target_names
from autopar.capture.torch_forwards import without_values
from autopar.errors import CaptureError
from autopar.tensors import differentiable
from autopar.text import first_line

ATTRIBUTES: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
"""Plain tensor attributes of a shadow's modules -> the same in the model; no checkpoint changes these."""
BUFFERS: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
"""Buffers of integers and masks of a shadow's modules -> the same in the model; a checkpoint may change these."""


def shadow(model: nn.Module, keep: Mapping[str, Mapping[int, int]] | None = None) -> nn.Module:
    """A meta copy of `model`; of each container in `keep` only the listed children, `{number in the copy: number in the
    model}`.

    Raises CaptureError for a model that holds what cannot be copied.
    """
    try:
        with closures_copied(model):
            return _shadow(model, keep)
    except TypeError as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied: {first_line(error)}. It is captured as a copy without weights: "
            "keep what has no copies (a lock, an open file, a connection, a generator) outside of the model, or give "
            "its class a __deepcopy__"
        ) from error


def in_mode(twin: nn.Module, training: bool) -> nn.Module:
    """`twin` with the training flags of a mode. Where it trains, modules that the user has set to evaluation (frozen
    norms) stay so."""
    return twin if training and twin.training else twin.train(training)


def _shadow(model: nn.Module, keep: Mapping[str, Mapping[int, int]] | None) -> nn.Module:
    memo: dict[int, Any] = {}
    containers = {path: model.get_submodule(path) for path in keep or {}}
    _remember(model, memo, skip=list(containers.values()))
    for path, numbers in (keep or {}).items():
        container = containers[path]
        for number in numbers.values():
            _remember(container.get_submodule(str(number)), memo)
        short = memo[id(container)] = type(container).__new__(type(container))
        vars(short).update({k: copy.deepcopy(v, memo) for k, v in vars(container).items() if k != "_modules"})
        short._modules = {
            str(shown): copy.deepcopy(container.get_submodule(str(n)), memo) for shown, n in numbers.items()
        }
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    without_values(twin)
    return twin


def _remember(root: nn.Module, memo: dict[int, Any], skip: Sequence[nn.Module] = ()) -> None:
    """Put a meta twin of every tensor below `root` into the memo of deepcopy."""
    for table in (root._parameters, root._buffers):
        for tensor in table.values():
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor)
    for buffer in root._buffers.values():
        if buffer is not None and not differentiable(buffer):
            _value_of(memo[id(buffer)], buffer, BUFFERS)
    for value in vars(root).values():
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            memo[id(value)] = _on_meta(value)
            _value_of(memo[id(value)], value, ATTRIBUTES)
        elif isinstance(value, ModuleType):
            memo[id(value)] = value  # `self.backend = torch`: a module of Python is there once
    if not any(root is other for other in skip):
        for child in root.children():
            _remember(child, memo, skip)


def _value_of(twin: torch.Tensor, tensor: torch.Tensor, values: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
    """Put into `values` what the twin of a tensor is in the model, if that has values."""
    if (held := values.get(tensor, None if tensor.is_meta else tensor)) is not None:
        values[twin] = held


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on meta; sparse ones become dense, as they are on ranks."""
    empty = (
        torch.empty_like(tensor, device="meta")
        if tensor.layout is torch.strided
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    )
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class WithLoss(nn.Module):
    """A model and a loss function as one module: `forward(*inputs, *targets) -> (loss, outputs)`.

    The last `targets` positional arguments go to `loss_fn(outputs, *targets)`, the `inputs` before them to the model.
    They have the names that both have for them.
    """

    INNER = "_model_of_loss"  # the name of the model in it, which no user's module has

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor], targets: int, inputs: int) -> None:
        super().__init__()
        self.add_module(self.INNER, model)
        vars(self)["loss_fn"] = loss_fn  # not a submodule where it is a module: its parameters are not the model's

        def forward(*args: Any, **kwargs: Any) -> dict[str, Any]:
            """The loss, and the model's own outputs."""
            outputs = self.get_submodule(self.INNER)(*args[:inputs], **kwargs)
            return {"loss": loss_fn(outputs, *args[inputs:]), "outputs": outputs}

        named = _signature(model, loss_fn, inputs, targets)
        if named is not None:
            vars(forward)["__signature__"] = named
        self.forward = forward


def _signature(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], inputs: int, targets: int
) -> inspect.Signature | None:
    """`(x, y, *, mask=None)` for a model that takes (x, mask=None) and a loss that takes (outputs, y); None where the
    model does not name its inputs."""
    taken = list(inspect.signature(model.forward).parameters.values())
    placed = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(placed) < inputs:
        return None
    names = {p.name: None for p in taken}
    behind = [n if n not in names else f"{n}_target" for n in target_names(loss_fn)[:targets]]
    if len(behind) < targets or any(n in names for n in behind):
        return None
    first = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for n in (*(p.name for p in placed[:inputs]), *behind)
    ]
    rest = [
        p.replace(kind=p.KEYWORD_ONLY) if p in placed else p
        for p in taken
        if p not in placed[:inputs] and p.kind != p.VAR_POSITIONAL
    ]
    return inspect.Signature([*first, *sorted(rest, key=lambda p: p.kind)])
