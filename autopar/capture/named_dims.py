"""The user's dynamic_shapes matched to the flat inputs. Called by dims.

Three forms, as torch.export has them: `(args, kwargs)`; a dict by the names of forward's parameters, targets of a loss
function included; a tuple of positional ones. Inputs that hold several have the same structure in each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from autopar._torch import pytree

Found = dict[int, Mapping[int, Any]]  # dims by the number of the flat input


def assigned(given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: inspect.Signature) -> Found:
    """What `given` says of each of the flat inputs `(args, kwargs)` of a forward of this `signature`. Raises
    ValueError, with what is wanted, where it does not fit them."""
    flat, tree = pytree.tree_flatten((args, dict(kwargs)))
    places, named = pytree.tree_unflatten(list(range(len(flat))), tree)
    if isinstance(given, Mapping):
        return dict(_each(_by_name(signature, places, named), given, "inputs"))
    if not isinstance(given, (tuple, list)):
        raise ValueError("it is neither a tuple nor a dict by the names of the inputs")
    if _is_pair(given):
        return dict(
            [
                *_each(tuple(places), tuple(given[0] or ()), "positional inputs"),
                *_each(named, given[1] or {}, "named inputs"),
            ]
        )
    return dict(_each((*places, *named.values()), tuple(given), "inputs"))


def _is_pair(given: Any) -> bool:
    """Whether it is `(args, kwargs)`, and not the dims of two positional inputs."""
    if len(given) != 2 or not (given[1] is None or isinstance(given[1], Mapping)):
        return False
    return isinstance(given[0], (tuple, list)) or (
        not given[0] and all(isinstance(key, str) for key in given[1] or ()) and bool(given[1])
    )


def _by_name(signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by the names that forward has for them, those of **kwargs among the others."""
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        found.update(value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found


def _each(inputs: Any, given: Any, where: str) -> Iterator[tuple[int, Mapping[int, Any]]]:
    """The dims of each input of a structure, those that are given some."""
    if isinstance(inputs, int):
        if given is not None and not (isinstance(given, Mapping) and all(type(dim) is int for dim in given)):
            raise ValueError(f"{where} has {given!r}")
        if given:
            yield inputs, given
    elif given is None:  # no dims of anything in it
        return
    elif isinstance(inputs, Mapping):
        if not isinstance(given, Mapping) or set(given) != set(inputs):
            got = ", ".join(map(str, given)) if isinstance(given, Mapping) else repr(given)
            raise ValueError(f"{where} are {', '.join(map(str, inputs)) or 'none'}, got {got or 'none'}")
        for name, item in inputs.items():
            yield from _each(item, given[name], str(name))
    else:
        items = list(inputs) if isinstance(inputs, (tuple, list)) else pytree.tree_leaves(inputs)
        dims = list(given) if isinstance(given, (tuple, list)) else pytree.tree_leaves(given, is_leaf=_is_dims)
        if len(dims) != len(items):
            raise ValueError(f"{len(items)} {where}, got {len(dims)}")
        for index, (item, mine) in enumerate(zip(items, dims, strict=True)):
            yield from _each(item, mine, f"{where}[{index}]")


def _is_dims(item: Any) -> bool:
    return item is None or (isinstance(item, Mapping) and all(isinstance(key, int) for key in item))
