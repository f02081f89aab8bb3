"""Refusal of optimizers that were made of the model's own parameters, before it was compiled, as scripts for DDP do: no
gradient ever reaches these, so that steps would do nothing, in silence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError

_old: Any = WeakIdKeyDictionary()


def watch(parameters: Iterable[nn.Parameter]) -> None:
    """Raise RunError in the step of an optimizer that has some of these, and no gradient of any of its parameters. The
    model itself may train beside the compiled one."""
    _old.update(dict.fromkeys(parameters))


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _old or len(args) > 1 or kwargs:  # a closure makes gradients
        return
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    if all(param.grad is None for param in stepped) and any(param in _old for param in stepped):
        raise RunError(
            f"this {type(optimizer).__name__} was made of the parameters of the model that was compiled, which no "
            "gradient reaches, so that its steps change nothing: make the optimizer behind compile, of the compiled "
            "model's parameters()"
        )


register_optimizer_step_pre_hook(_before)
