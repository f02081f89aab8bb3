"""Optimizer state in the memory of the host: parameters and gradients stay on the device, where the optimizer steps one parameter after the
other, with its state brought there and taken back.

Nobody has to ask for it: a model whose plan has it so (`Param.host_state`) is known here from when it is built on, and any torch optimizer of its
parameters is led through them in front of its step. torch's optimizers know what they know of each parameter by itself and leave out what has
no gradient, so the numbers are those of one step for all, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar._torch import local_of, wrap_like
from autopar.errors import RunError
from autopar.runtime.params import Built

HOST = torch.device("cpu")


_modules: WeakSet[Any] = WeakSet()
_gradients: WeakKeyDictionary[torch.optim.Optimizer, dict[Tensor, Tensor]] = WeakKeyDictionary()  # of what has been stepped, while the rest is


def install(module: Built) -> None:
    """Keep the state of optimizers of `module` on the host, where its plan says so."""
    if any(held.info.host_state for held in module._held.values()):
        _modules.add(module)


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Step the parameters whose state is on the host; then they have no gradient until the rest is stepped too."""
    ours = {id(held.tensor) for module in _modules for held in module._held.values() if held.info.host_state}
    groups = [group["params"] for group in optimizer.param_groups]
    gradients = {param: param.grad for params in groups for param in params if id(param) in ours and param.grad is not None}
    if not gradients:
        return
    if any(value is not None for value in (*args[1:], *kwargs.values())):  # the first is the optimizer
        raise RunError("optimizer.step(closure) with optimizer state on the host: the closure would run once for every parameter; call step() without "
                       "one, behind train_step")
    step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks, which are those of the whole step
    try:
        for at, params in enumerate(groups):
            for param in params:
                if param in gradients:
                    for number, group in enumerate(optimizer.param_groups):
                        group["params"] = [param] if number == at else []
                    homes = _brought(optimizer.state.get(param, {}), param)
                    step(optimizer)
                    _taken(optimizer.state[param], param, homes)
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
    for param in gradients:
        param.grad = None
    _gradients[optimizer] = gradients


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gradients are there again, until users clear them."""
    for param, gradient in _gradients.pop(optimizer, {}).items():
        param.grad = gradient


def _brought(state: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
    """Bring the tensors of `state` that are shaped as `param` to its device; gives where they were."""
    device, homes = local_of(param).device, dict[str, Tensor]()
    for key, value in state.items():
        if _beside(value, param) and local_of(value).device == HOST:
            homes[key] = local_of(value)
            state[key] = wrap_like(homes[key].to(device, non_blocking=True), value)
    return homes


@torch.no_grad()
def _taken(state: dict[str, Any], param: Tensor, homes: Mapping[str, Tensor]) -> None:
    """Take them back to where they were, or what is new to the host (pinned, where the device can copy from there by itself)."""
    for key, value in state.items():
        if not _beside(value, param):
            continue
        local = local_of(value)
        home = homes.get(key)
        if home is None:
            home = local if local.device == HOST else torch.empty(local.shape, dtype=local.dtype, device=HOST, pin_memory=local.is_cuda)
        if home is not local:
            state[key] = wrap_like(home.copy_(local), value)


def _beside(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
