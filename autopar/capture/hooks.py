"""Refusal of what changes the backward from outside of a model's operators, in models that train: backward hooks,
hooks on saved tensors, and weights that forward freezes or unfreezes. A captured graph does not have them, so gradients
would differ without an error. Called by asked and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autopar.capture._torch import backward_hooks_of_all_modules
from autopar.capture.lines import caller
from autopar.errors import CaptureError

ON_TENSORS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
ON_NODES = ("register_hook", "register_prehook")
"""Methods of a node of autograd."""
SETTING_FLAGS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]  # a property
ADVICE = (
    "remove it before compile (`handle.remove()`) and change gradients between `train_step` and `optimizer.step`, "
    "or write what it does to them as a torch.autograd.Function"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError where a module or a parameter of `model` has a hook of the backward."""
    everywhere = ["every module (torch.nn.modules.module)"] if backward_hooks_of_all_modules() else []
    modules = [
        f"module {name or type(model).__name__}"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    weights = [
        f"parameter {name}"
        for name, weight in model.named_parameters()
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    ]
    if found := everywhere + modules + weights:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise CaptureError(
            f"{type(model).__name__}: {found[0]}{others} has a backward hook, which would not run in the sharded "
            f"module; {ADVICE}"
        )


class _Node:
    """A node of autograd that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ON_NODES:
            _refuse_hook("a node of autograd", f"grad_fn.{name}")
        return getattr(self._node, name)


class _Refusing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in ON_TENSORS:
            _refuse_hook("a tensor", func.__name__)
        if func in SETTING_FLAGS and isinstance(args[0], nn.Parameter):
            _refuse_flag(args[0], bool(given.get("requires_grad", args[1] if len(args) > 1 else True)))
        result = func(*args, **given)
        if func == GRAD_FN and result is not None:
            return _Node(result)
        return result


def _refuse_hook(what: str, how: str) -> NoReturn:
    raise CaptureError(
        f"{caller()} gives {what} a backward hook ({how}), which would not run in the sharded module; {ADVICE}"
    )


def _refuse_flag(weight: nn.Parameter, trains: bool) -> None:
    """Raise CaptureError where forward changes whether `weight` trains."""
    if weight.requires_grad != trains:
        raise CaptureError(
            f"{caller()} sets requires_grad of a weight to {trains} in forward, and a graph has weights that train or "
            "do not: use detached weights there (torch.func.functional_call(module, {name: weight.detach() for name, "
            "weight in module.named_parameters()}, inputs)), or set it before compile, for all steps"
        )


def _enter(hooks: saved_tensors_hooks) -> None:
    """As `saved_tensors_hooks.__enter__`, for those of torch alone (checkpoints, save_on_cpu): they give back what they
    got."""
    kind = type(hooks)
    if kind is saved_tensors_hooks or not kind.__module__.startswith("torch."):
        raise CaptureError(
            f"{caller()} changes what the backward reads (torch.autograd.graph.saved_tensors_hooks), which the sharded "
            "module would not do: leave it out, plans choose what is kept and what is computed again (remat=), or "
            "write the operator as a torch.autograd.Function that saves what you want"
        )
    _ENTER(hooks)


_ENTER = saved_tensors_hooks.__enter__


@contextmanager
def refusing_hooks() -> Iterator[None]:
    """A context in which forward raises CaptureError where it gives a tensor a hook, hooks what is saved for the
    backward, or changes whether a weight trains."""
    with mock.patch.object(saved_tensors_hooks, "__enter__", _enter), _Refusing():
        yield
