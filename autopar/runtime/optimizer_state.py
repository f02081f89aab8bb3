"""Optimizer state by original parameter names and in original order, so that it can be saved, and loaded under another plan.

Moments lie as their parameter does. Where that is in sections (params.py) a checkpoint of the optimizer as it stands would hold
reordered rows, which another plan would read in the wrong order without noticing: save and load through these functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from autopar._torch import local_of
from autopar.errors import RunError
from autopar.optimizers import OPTIMIZERS
from autopar.runtime.checkpoint import at_rest, unsection
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held

State = dict[str, Any]


def optimizer_of(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """The optimizer of a plan as it is priced: on GPUs in one pass over the memory, where DTensors have that; torch by itself takes a pass for each operator."""
    held, kind = list(parameters), OPTIMIZERS[name]
    fused = kind.fused and bool(held) and all(p.is_cuda and p.is_floating_point() for p in held)
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind.torch_name)
    return make(held, lr=lr, fused=fused or None, **kind.options)


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, held: Mapping[str, Held], mesh: Mesh) -> State:
    """As torch's get_optimizer_state_dict, in original order. Parameters that train and have no state yet, which no gradient has reached, or before the first step all of them, have that with which
    their first step begins: a checkpoint has what an optimizer that it is loaded into, and has not stepped, asks for. The optimizer stays as it is.

    Raises RunError where it is none of the model's."""
    _check_optimizer(model, optimizer)
    found: State | None = dict(get_optimizer_state_dict(model, optimizer)) if optimizer.state else None
    if found is None or _steps_alone(optimizer):
        with _unstepped(optimizer):
            made = _first(get_optimizer_state_dict(model, optimizer))
        state: State = {**made["state"], **(found or made)["state"]}
        found = {**(found or made), "state": {name: state[name] for name, _ in model.named_parameters() if name in state}}
    return _mapped(found, held, lambda value, h: unsection(local_of(value), h, mesh))


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some parameters have no state, and a step of them alone makes it: of one that needs a closure (LBFGS) it is that of all parameters together."""
    needed = [one for one in inspect.signature(type(optimizer).step).parameters.values() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return len(needed) < 2 and any(not optimizer.state.get(param) for group in optimizer.param_groups for param in group["params"])


@contextmanager
def _unstepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer has those parameters alone that have no state, and torch makes it by a step on gradients of zero, unless there are others; behind it all is as before."""
    state, groups = dict(optimizer.state), [group["params"] for group in optimizer.param_groups]
    gradients = {param: param.grad for params in groups for param in params if not state.get(param)}
    optimizer.state.clear()
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [param for param in params if param in gradients]
    for param in gradients:
        param.grad = None
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for param, gradient in gradients.items():
            param.grad = gradient


FIRST: Mapping[str, Callable[[State], float]] = {"step": lambda group: 0.0, "mu_product": lambda group: 1.0, "eta": lambda group: float(group["lr"])}
"""Numbers in the state of torch's optimizers that a step without a gradient changes, as they are before the first one."""


def _first(made: Mapping[str, Any]) -> State:
    """State that one step on gradients of zero has made, as it is before it."""
    groups = {name: group for group in made["param_groups"] for name in group["params"]}
    return {**made, "state": {name: {key: _as(value, FIRST[key](groups[name])) if key in FIRST else value for key, value in values.items()}
                              for name, values in made["state"].items()}}


def _as(value: Any, number: float) -> Any:
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: State, held: Mapping[str, Held],
                              mesh: Mesh) -> None:
    """The inverse of `optimizer_state_dict`. A checkpoint has the groups of parameters as one rank had them, and on another place of a pipeline,
    or under another plan, they have other members: options are taken of them, members are this optimizer's own.

    Raises RunError where the optimizer is none of the model's, the state is not what `optimizer_state_dict` gave or of another kind of optimizer, and where the numbers of groups differ.
    """
    _check_optimizer(model, optimizer)
    _check_state(state)
    own: Any = get_optimizer_state_dict(model, optimizer)["param_groups"]
    if len(own) != len(state["param_groups"]):
        raise RunError(f"the optimizer has {len(own)} groups of parameters, the saved state {len(state['param_groups'])}; make the same groups before loading")
    for number, (saved, mine) in enumerate(zip(state["param_groups"], own, strict=True)):
        lacks, more = [[key for key in one if key not in other] for one, other in ((mine, saved), (saved, mine))]
        if lacks and more:  # only one of them: another version of torch
            raise RunError(f"the saved state is of another kind of optimizer than {type(optimizer).__name__}: group {number} has {', '.join(more)} and no {', '.join(lacks)}; make the optimizer that was saved")
    groups = [{**mine, **saved, "params": mine["params"]} for saved, mine in zip(state["param_groups"], own, strict=True)]
    with _without_empty(optimizer, groups) as there:
        if there:
            set_optimizer_state_dict(model, optimizer, _mapped({**state, "param_groups": there}, held, lambda value, h: at_rest(value, h, mesh)))


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise RunError unless it is an optimizer of parameters of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RunError(f"optimizer is a {type(optimizer).__name__}; wanted a torch.optim.Optimizer of the compiled model's parameters()")
    own = {id(parameter) for parameter in model.parameters()}
    others = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if others:
        raise RunError(f"{others} of the tensors that the optimizer steps are no parameters of the compiled model, whose gradients never reach them (those of the model that was compiled are others): "
                       "make the optimizer of the compiled model's parameters()")


def _check_state(state: Any) -> None:
    """Raise RunError unless it has the form that `optimizer_state_dict` gives."""
    wanted = "wanted what optimizer_state_dict(optimizer) of the compiled model gave"
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
        raise RunError(f"the optimizer's state is a {type(state).__name__}{f' of {list(state)[:5]}' if isinstance(state, Mapping) else ''}; {wanted}, with state and param_groups")
    if numbers := [name for name in state["state"] if not isinstance(name, str)]:
        raise RunError(f"the optimizer's state is by number ({', '.join(map(str, numbers[:3]))}{', ...' if numbers[3:] else ''}), as optimizer.state_dict() gives it: what has which number "
                       f"depends on the plan and the place; {wanted}, by name")


@contextmanager
def _without_empty(optimizer: torch.optim.Optimizer, groups: list[State]) -> Iterator[list[State]]:
    """Inside, the optimizer has none of its groups without parameters, as a place of a pipeline may have: torch mistakes others for them. Gives those of
    `groups` that are left; the options of the others are taken of them."""
    filled = [bool(group["params"]) for group in groups]
    idle = [group for group, there in zip(optimizer.param_groups, filled, strict=True) if not there]
    optimizer.param_groups = [group for group, there in zip(optimizer.param_groups, filled, strict=True) if there]
    try:
        yield [group for group, there in zip(groups, filled, strict=True) if there]
    finally:
        loaded, others = iter(optimizer.param_groups), iter(idle)
        optimizer.param_groups = [next(loaded) if there else {**next(others), **group, "params": []} for group, there in zip(groups, filled, strict=True)]


@torch.no_grad()
def _mapped(state: Mapping[str, Any], held: Mapping[str, Held], change: Callable[[Tensor, Held], Tensor]) -> State:
    found = {}
    for name, values in state["state"].items():
        h = held.get(name)
        found[name] = values if h is None or not h.info.sectioned else {
            key: change(value, h) if isinstance(value, DTensor) and tuple(value.shape) == h.info.shape else value
            for key, value in values.items()}
    return {**state, "state": found}
