"""Optimizers whose step takes all parameters for one vector: a rank of a pipeline has those of its own place alone."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import RunError
from autopar.runtime.params import Built

_modules: WeakSet[Any] = WeakSet()


def install(module: Built) -> None:
    """Have such optimizers of `module`, which is on several places, refused."""
    _modules.add(module)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(optimizer, LBFGS):
        parted = {id(held.tensor) for module in _modules for held in module._held.values()}
        if any(id(param) in parted for group in optimizer.param_groups for param in group["params"]):
            raise RunError("LBFGS takes inner products over all parameters, and in a pipeline each rank would take them over those of its own place: the directions would not be those of the model. Use an "
                           'optimizer that steps each parameter by itself (AdamW, SGD, Muon), or a plan without stages (recipe="zero3"), where LBFGS steps as on one device')


register_optimizer_step_pre_hook(_before)
