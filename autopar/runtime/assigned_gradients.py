"""A check that nobody wrote `parameter.grad.data = value`, as code that scales gradients does: a DTensor keeps its own
numbers, in silence, as that of `parameter.data = value` does (assigned_data.py, with what gives it away)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import RunError

_made: Any = WeakTensorKeyDictionary()
"""Gradients, with their storages, which hold no numbers and are held so that no other one has their address."""


def watch(grad: Tensor) -> None:
    """Remember a gradient that was made."""
    if isinstance(grad, DTensor):
        _made[grad] = grad.untyped_storage()


def check(parameters: Iterable[Tensor]) -> None:
    """Raise RunError where `data` of the gradient of some of these was assigned."""
    for param in parameters:
        grad = param.grad
        if not isinstance(grad, DTensor) or (storage := _made.get(grad)) is None:
            continue
        if grad.untyped_storage()._cdata != storage._cdata:
            raise RunError(
                f"grad.data = value was written for a parameter of shape {tuple(param.shape)}. A gradient is a "
                "DTensor, which ignores that and has its own numbers still: write them in place, grad.copy_(value), or "
                "assign parameter.grad = value"
            )


def _before(optimizer: Optimizer, *_: Any) -> None:
    check(param for group in optimizer.param_groups for param in group["params"])


register_optimizer_step_pre_hook(_before)
