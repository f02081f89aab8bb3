"""Optimizer state by original parameter names and in original order, so that it can be saved, and loaded under another
plan.

Moments lie as their parameter does. Where that is in sections (params.py) a checkpoint of the optimizer as it stands
would hold reordered rows, which another plan would read in the wrong order without noticing: save and load through
these functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar._torch import local_of, wrap_like
from autopar.errors import RunError
from autopar.optimizers import OPTIMIZERS
from autopar.runtime import other_state
from autopar.runtime.checkpoint import at_rest, part_of_another, unsection
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held

State = dict[str, Any]


def optimizer_of(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """The optimizer that a plan names, with the options with which it is priced: fused on GPUs where it has that (one
    pass over memory, where the default takes one per operator)."""
    held, kind = list(parameters), OPTIMIZERS[name]
    fused = kind.fused and bool(held) and all(p.is_cuda and p.is_floating_point() for p in held)
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind.torch_name)
    return make(held, lr=lr, fused=fused or None, **kind.options)


def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, held: Mapping[str, Held], mesh: Mesh
) -> State:
    """As torch's get_optimizer_state_dict, with rows in original order. Parameters that have no state yet (no gradient
    has reached them, or there was no step) get the state with which their first step begins, so that the checkpoint is
    complete for an optimizer that has not stepped. Those that are frozen and have none get none. The optimizer is not
    changed.

    Raises RunError where it does not step the parameters of `model`."""
    _check_optimizer(model, optimizer)
    found: State | None = dict(get_optimizer_state_dict(model, optimizer)) if optimizer.state else None
    bare = [param for group in optimizer.param_groups for param in group["params"] if not optimizer.state.get(param)]
    if found is None or (bare and _steps_alone(optimizer)):
        with _unstepped(optimizer, bare, [_without_decay(group) for group in optimizer.param_groups]):
            made = _first(get_optimizer_state_dict(model, optimizer))
        made["param_groups"] = [
            {**group, **_decay(own)} for group, own in zip(made["param_groups"], optimizer.param_groups, strict=True)
        ]
        state: State = {**made["state"], **(found or made)["state"]}
        found = {
            **(found or made),
            "state": {name: state[name] for name, _ in model.named_parameters() if name in state},
        }
    return _mapped(
        found,
        held,
        lambda value, h: (
            unsection(local_of(value), h, mesh) if h.info.sectioned and isinstance(value, DTensor) else value
        ),
        lambda key, value, h: other_state.saved(key, value, h, mesh),
    )


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has state for each parameter by itself. One whose step needs a closure (LBFGS) has state of
    all parameters together."""
    needed = [
        one
        for one in inspect.signature(type(optimizer).step).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return len(needed) < 2


@contextmanager
def _unstepped(
    optimizer: torch.optim.Optimizer, params: Iterable[Tensor], options: Iterable[Mapping[str, Any]]
) -> Iterator[None]:
    """A context in which the optimizer has only `params`, without state or gradients, in groups with these `options`.
    There torch's get_optimizer_state_dict makes their state, by a step on zero gradients. Step hooks (averages of
    weights) are not called. Afterwards the optimizer is as before."""
    own = vars(optimizer).pop("step", None)  # that of a scheduler
    # torch calls hooks around it
    step = partial(getattr(type(optimizer).step, "__wrapped__", type(optimizer).step), optimizer)
    # torch gives a closure, which an optimizer of one's own need not take
    vars(optimizer)["step"] = step if "closure" in inspect.signature(step).parameters else lambda closure: step()
    state, groups, gradients = dict(optimizer.state), optimizer.param_groups, {param: param.grad for param in params}
    optimizer.state.clear()
    optimizer.param_groups = [
        {**option, "params": [param for param in group["params"] if param in gradients]}
        for group, option in zip(groups, options, strict=True)
    ]
    for param in gradients:
        param.grad = None
    try:
        yield
    finally:
        del vars(optimizer)["step"]
        vars(optimizer).update({} if own is None else {"step": own})
        optimizer.state.clear()
        optimizer.state.update(state)
        optimizer.param_groups = groups
        for param, gradient in gradients.items():
            param.grad = gradient


def _decay(group: Mapping[str, Any]) -> State:
    """The weight decay among the options of a group, if any."""
    return {key: group[key] for key in ("weight_decay",) if key in group}


def _without_decay(group: Mapping[str, Any]) -> State:
    """`group` with a weight decay of 0: most optimizers add the decay to the gradient, so moments of a zero gradient
    would not be zero."""
    return {**group, **dict.fromkeys(_decay(group), 0.0)}


FIRST: Mapping[str, Callable[[State], float]] = {
    "step": lambda group: 0.0,
    "mu_product": lambda group: 1.0,
    "eta": lambda group: float(group["lr"]),
}
"""Numbers in the state of torch's optimizers that a step without a gradient changes, as they are before the first
one."""
NUMBERS = (*FIRST, "mu")
"""The keys of all such numbers in torch's optimizers."""


NONE_YET = "momentum_buffer"
"""A tensor that SGD does not have before the first step, which sets it to the whole gradient; with dampening, later
steps add a part of theirs."""


def _first(made: Mapping[str, Any]) -> State:
    """The state that one step on zero gradients `made`, as it is before that step. Where there is no tensor before the
    first step, it is nan, which `_begin` removes after loading; another loader would train to nan."""
    groups = {name: group for group in made["param_groups"] for name in group["params"]}
    first = {
        name: {**FIRST, **({NONE_YET: lambda group: math.nan} if _dampens(group) else {})}
        for name, group in groups.items()
    }
    return {
        **made,
        "state": {
            name: {
                key: _as(value, first[name][key](groups[name])) if key in first[name] else value
                for key, value in values.items()
            }
            for name, values in made["state"].items()
        },
    }


def _dampens(group: Mapping[str, Any]) -> bool:
    return bool(group.get("dampening") and group.get("momentum"))


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Remove loaded tensors that stand for no tensor yet (`_first`)."""
    for group in filter(_dampens, optimizer.param_groups):
        for state in (optimizer.state.get(param, {}) for param in group["params"]):
            if isinstance(state.get(NONE_YET), Tensor) and local_of(state[NONE_YET]).isnan().all():
                state[NONE_YET] = None


def _as(value: Any, number: float) -> Any:
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


def load_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    held: Mapping[str, Held],
    mesh: Mesh,
    *,
    strict: bool = True,
) -> None:
    """The inverse of `optimizer_state_dict`.

    A checkpoint has the groups of parameters of the rank that saved it. On another place of a pipeline, or under
    another plan, groups have other members. So the options of a group are loaded, and its members are those of
    `optimizer`. Frozen members get their state too, for when they train again. Tensors may be whole, as one device has
    them.

    Raises RunError where the optimizer is none of the model's, the state is not what `optimizer_state_dict` gave or of
    another kind of optimizer, where the numbers of groups differ, and with `strict` where parameters that train have no
    state in it and would begin anew; then nothing was loaded.
    """
    _check_optimizer(model, optimizer)
    _check_state(state)
    groups = _loaded_groups(model, optimizer, state["param_groups"])
    if strict:
        _check_complete(model, optimizer, state["state"], groups)
    there = {name: state["state"][name] for group in groups for name in group["params"] if name in state["state"]}
    optimizer.load_state_dict(
        _mapped(
            {"state": there, "param_groups": groups},
            held,
            lambda value, h: _own_part(value, h, mesh),
            lambda key, value, h: other_state.loaded(key, value, h, mesh),
        )
    )
    _begin(optimizer)


def _loaded_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved_groups: Sequence[State]) -> list[State]:
    """The groups of `optimizer` with their members by name, and with the options of `saved_groups`. Raises RunError
    where these are of another number, or of another kind of optimizer."""
    own = [
        {**group, "params": named}
        for group, named in zip(optimizer.param_groups, _names(model, optimizer), strict=True)
    ]
    if len(own) != len(saved_groups):
        raise RunError(
            f"the optimizer has {len(own)} groups of parameters, the saved state {len(saved_groups)}; make the same "
            "groups before loading"
        )
    for number, (saved, mine) in enumerate(zip(saved_groups, own, strict=True)):
        lacks = [key for key in mine if key not in saved and key not in MEMBERS]
        more = [key for key in saved if key not in mine and key not in MEMBERS]
        if lacks and more:  # only one of them: another version of torch
            raise RunError(
                f"the saved state is of another kind of optimizer than {type(optimizer).__name__}: group {number} has "
                f"{', '.join(more)} and no {', '.join(lacks)}; make the optimizer that was saved"
            )
    return [
        {**mine, **saved, **{key: mine[key] for key in MEMBERS if key in mine}}
        for saved, mine in zip(saved_groups, own, strict=True)
    ]


def _own_part(value: Tensor, h: Held, mesh: Mesh) -> Tensor:
    """This rank's part of a loaded tensor; of a whole tensor a copy, since a view would keep all of it in memory."""
    made = at_rest(value, h, mesh)
    return made if isinstance(value, DTensor) else wrap_like(local_of(made).clone(), made)


MEMBERS = ("params", "param_names")
"""Keys of an optimizer's group that are no options."""


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters of each group."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _check_complete(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], groups: Sequence[State]
) -> None:
    """Raise RunError unless `saved` has the state of all parameters that train and have some under the options of
    `groups`."""
    named = dict(model.named_parameters())
    trained = [name for group in groups for name in group["params"] if named[name].requires_grad]
    bare = [name for name in trained if not saved.get(name)]
    if not _steps_alone(optimizer):
        bare = [name for name in bare if name == trained[0]]  # which has the state of all
    elif bare:
        with _unstepped(optimizer, [named[name] for name in bare], groups):
            made: Any = get_optimizer_state_dict(model, optimizer)["state"]
        bare = [name for name in bare if made.get(name)]
    if bare:
        raise RunError(
            f"the saved state has nothing of {len(bare)} of the {len(trained)} parameters that the optimizer steps, "
            f"which would begin anew: {', '.join(bare[:5])}{' ...' if len(bare) > 5 else ''}. Load what was saved of "
            "all of them, or let these begin anew with load_optimizer_state_dict(..., strict=False)"
        )


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise RunError unless it is an optimizer of parameters of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RunError(
            f"optimizer is a {type(optimizer).__name__}; wanted a torch.optim.Optimizer of the compiled model's "
            "parameters()"
        )
    own = {id(parameter) for parameter in model.parameters()}
    others = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if others:
        raise RunError(
            f"{others} of the tensors that the optimizer steps are no parameters of the compiled model, whose "
            "gradients never reach them (those of the model that was compiled are others): make the optimizer of the "
            "compiled model's parameters()"
        )


def _check_state(state: Any) -> None:
    """Raise RunError unless it has the form that `optimizer_state_dict` gives."""
    wanted = "wanted what optimizer_state_dict(optimizer) of the compiled model gave"
    if (
        not isinstance(state, Mapping)
        or not isinstance(state.get("state"), Mapping)
        or not isinstance(state.get("param_groups"), list)
    ):
        raise RunError(
            "the optimizer's state is a "
            f"{type(state).__name__}{f' of {list(state)[:5]}' if isinstance(state, Mapping) else ''}; {wanted}, with "
            "state and param_groups"
        )
    if numbers := [name for name in state["state"] if not isinstance(name, str)]:
        raise RunError(
            f"the optimizer's state is by number ({', '.join(map(str, numbers[:3]))}{', ...' if numbers[3:] else ''}), "
            f"as optimizer.state_dict() gives it: what has which number depends on the plan and the place; {wanted}, "
            "by name"
        )


@torch.no_grad()
def _mapped(
    state: Mapping[str, Any],
    held: Mapping[str, Held],
    change: Callable[[Tensor, Held], Tensor],
    change_other: Callable[[str, Tensor, Held], Tensor],
) -> State:
    """`state` with `change` applied to its tensors that are shaped as their parameter, and `change_other` to all
    others. Counters (`_counters`) of a parameter without dims (the scale of logits) have that shape too, and are
    others."""
    counters = _counters(state, held)

    def changed(key: str, value: Any, h: Held) -> Any:
        if not isinstance(value, Tensor):
            return value
        like_parameter = tuple(value.shape) == h.info.shape and (value.dim() or key not in counters)
        return change(value, h) if like_parameter else change_other(key, value, h)

    found = {
        name: {key: changed(key, value, held[name]) for key, value in values.items()} if name in held else values
        for name, values in state["state"].items()
    }
    return {**state, "state": found}


def _counters(state: Mapping[str, Any], held: Mapping[str, Held]) -> set[str]:
    """The keys of an optimizer's state that hold numbers: those of torch's optimizers, and those that hold a tensor
    without dims for some parameter that has dims."""
    found = set(NUMBERS)
    for name, values in state["state"].items():
        if name in held and held[name].info.shape:
            found.update(key for key, value in values.items() if not getattr(value, "shape", True))
    return found


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise RunError where the state is another rank's part, from a file that one rank wrote and torch's
    `load_state_dict` took on all."""
    seen = set[tuple[int, tuple[Placement, ...]]]()
    for param, state in optimizer.state.items():
        for value in state.values():
            if not isinstance(param, DTensor) or not isinstance(value, DTensor):
                continue
            if value.device_mesh is param.device_mesh:  # made here, and so is what follows
                return
            how = id(value.device_mesh), value.placements
            if how not in seen and (rank := part_of_another(value)) is not None:
                raise RunError(
                    f"the state of this {type(optimizer).__name__} is the part of another rank, {rank}: torch.save of "
                    "optimizer.state_dict() on one rank saves that rank's part alone. Use optimizer_state_dict and "
                    "load_optimizer_state_dict of the model, with torch.distributed.checkpoint"
                )
            seen.add(how)


register_optimizer_step_pre_hook(_before_step)
