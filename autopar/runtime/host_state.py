"""Optimizer state in host memory (offload). Parameters and gradients stay on the device; for each parameter in turn,
its state is copied to the device, the optimizer steps that parameter, and the state is copied back.

It is automatic: models whose plan offloads state (`Param.host_state`) register here when they are built, and a global
pre-hook of torch's optimizers steps their parameters before the optimizer's own step. For that step their gradients are
set to None, and restored after it. torch's optimizers update each parameter by itself and skip those without a
gradient, so the result equals one step for all parameters, bit by bit.

Each of these steps is taken by a stand-in: an optimizer of the same class that shares the state and has one parameter.
So counters in the groups, or of the optimizer itself, advance once, in the optimizer's own step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar._torch import local_of, wrap_like
from autopar.errors import RunError
from autopar.runtime.params import Built

HOST = torch.device("cpu")


@dataclass
class _Aside:
    """The gradients of parameters that were already stepped, while the optimizer's own step runs; `inner`: how many
    nested calls of `step` (of a base class) are running in it."""

    gradients: Mapping[Tensor, Tensor]
    inner: int = 0


_modules: WeakSet[Any] = WeakSet()
_stand_ins: WeakSet[torch.optim.Optimizer] = WeakSet()
_aside: WeakKeyDictionary[torch.optim.Optimizer, _Aside] = WeakKeyDictionary()


def install(module: Built) -> None:
    """Keep the state of optimizers of `module` on the host, where its plan says so."""
    if any(held.info.host_state for held in module._held.values()):
        _modules.add(module)


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a step: step the parameters whose state is on the host, then hide their gradients from the optimizer's own
    step."""
    if optimizer in _stand_ins:
        return
    ours = {id(held.tensor) for module in _modules for held in module._held.values() if held.info.host_state}
    gradients = {
        param: param.grad
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in ours and param.grad is not None
    }
    if not gradients:
        if optimizer in _aside:  # a step that calls that of its base class
            _aside[optimizer].inner += 1
        return
    if any(value is not None for value in (*args[1:], *kwargs.values())):  # the first is the optimizer
        raise RunError(
            "optimizer.step(closure) with optimizer state on the host: the closure would run once for every "
            "parameter; call step() without one, behind train_step"
        )
    for number, group in enumerate(optimizer.param_groups):
        _step_each([param for param in group["params"] if param in gradients], optimizer, number)
    for param in gradients:
        param.grad = None
    _aside[optimizer] = _Aside(gradients)


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """After a step: restore the hidden gradients."""
    found = _aside.get(optimizer)
    if found is None:
        return
    if found.inner:
        found.inner -= 1
        return
    for param, gradient in _aside.pop(optimizer).gradients.items():
        param.grad = gradient


def _step_each(params: Sequence[Tensor], optimizer: torch.optim.Optimizer, number: int) -> None:
    """Step `params`, of group `number`, one after the other. Raises RunError where the steps leave different numbers in
    the group's options: such an optimizer computes an option from all parameters together, and would compute it from
    each alone here."""
    step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks, which are those of the whole step
    first: dict[str, float] = {}
    for param in params:
        homes = _brought(optimizer.state.get(param, {}), param)
        stand_in = _stand_in(optimizer, number, param)
        step(stand_in)
        _taken(optimizer.state[param], param, homes)
        now = {key: float(value) for key, value in stand_in.param_groups[number].items() if _is_number(value)}
        first = first or now
        torn = [key for key, value in now.items() if value != first.get(key)]
        if torn:
            raise RunError(
                f"optimizer {type(optimizer).__name__} makes its {torn[0]!r} of all parameters together, and with "
                "optimizer state on the host they are stepped one after the other: use one that steps each by itself, "
                'as those of torch.optim do, or plan without (recipe="zero1")'
            )


def _stand_in(optimizer: torch.optim.Optimizer, number: int, param: Tensor) -> torch.optim.Optimizer:
    """An optimizer that shares the state of `optimizer` and has only `param`, in group `number`."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(vars(optimizer))
    made.param_groups = [
        {
            **{key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()},
            "params": [param] if at == number else [],
        }
        for at, group in enumerate(optimizer.param_groups)
    ]
    _stand_ins.add(made)
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _brought(state: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
    """Copy the tensors of `state` that are shaped as `param` to its device. Returns the host tensors that they were, by
    key."""
    device, homes = local_of(param).device, dict[str, Tensor]()
    for key, value in state.items():
        if _beside(value, param) and local_of(value).device == HOST:
            homes[key] = local_of(value)
            state[key] = wrap_like(homes[key].to(device, non_blocking=True), value)
    return homes


@torch.no_grad()
def _taken(state: dict[str, Any], param: Tensor, homes: Mapping[str, Tensor]) -> None:
    """Copy the state back into the host tensors `homes`; state that this step made gets a new host tensor, pinned for
    CUDA devices."""
    for key, value in state.items():
        if not _beside(value, param):
            continue
        local = local_of(value)
        home = homes.get(key)
        if home is None:
            home = (
                local
                if local.device == HOST
                else torch.empty(local.shape, dtype=local.dtype, device=HOST, pin_memory=local.is_cuda)
            )
        if home is not local:
            state[key] = wrap_like(home.copy_(local), value)


def _beside(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
