"""The structure of arguments that hold several inputs (dicts, tuples and dataclasses of tensors), as plain dicts and
tuples of input names. Called by capture.capture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar._torch import pytree

KEYS = {pytree.MappingKey: "key", pytree.SequenceKey: "idx", pytree.GetAttrKey: "name"}


def nested(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """For each argument the name of its input, or a dict or tuple of such names; `names` are those of all leaves, in
    order. Empty where every argument is one input and its name is the input's (torch.export makes names lower case), or
    where an argument is of a class whose parts have no names."""
    queue, found = iter(names), {}
    for argument, value in zip([*_placed(signature, len(args)), *kwargs], [*args, *kwargs.values()], strict=True):
        paths = [path for path, _ in pytree.tree_flatten_with_path(value)[0]]
        if any(_key(step) is None for path in paths for step in path):
            return {}
        found[argument] = _described([(path, next(queue)) for path in paths])
    return found if any(described != argument for argument, described in found.items()) else {}


def _placed(signature: inspect.Signature, count: int) -> Iterator[str]:
    """Names of `count` positional arguments; those beyond the named ones are numbered."""
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    yield from named[:count]
    yield from (f"{others}_{number}" for number in range(count - len(named)))


def _key(step: Any) -> Any:
    """The key, index or attribute of one step of a pytree path; None where it has none, or one that a file cannot
    store."""
    key = getattr(step, KEYS[type(step)]) if type(step) in KEYS else None
    return key if type(key) in (str, int) else None


def _described(leaves: list[tuple[Any, str]]) -> Any:
    """Names at paths as dicts (of keys and attributes) and tuples."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    inner: dict[Any, list[tuple[Any, str]]] = {}
    for (first, *rest), name in leaves:
        inner.setdefault(_key(first), []).append((rest, name))
    if all(isinstance(path[0], pytree.SequenceKey) for path, _ in leaves):
        return tuple(_described(inner.get(number, [])) for number in range(max(inner, default=-1) + 1))
    return {key: _described(below) for key, below in inner.items()}
