"""Refusal of backward hooks in models that train: a captured graph does not have them, so gradients would differ
without an error. Called by asked and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.lines import caller
from autopar.errors import CaptureError

REGISTERED = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
ADVICE = (
    "remove it before compile (`handle.remove()`) and change gradients between `train_step` and `optimizer.step`, "
    "or write what it does to them as a torch.autograd.Function"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError where a module or a parameter of `model` has a hook of the backward."""
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
    if found := modules + weights:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise CaptureError(
            f"{type(model).__name__}: {found[0]}{others} has a backward hook, which would not run in the sharded "
            f"module; {ADVICE}"
        )


class _Refusing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REGISTERED:
            raise CaptureError(
                f"{caller()} gives a tensor a backward hook ({func.__name__}), which would not run in the sharded "
                f"module; {ADVICE}"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def refusing_hooks() -> Iterator[None]:
    """A context in which CaptureError is raised where a tensor is given a backward hook."""
    with _Refusing():
        yield
