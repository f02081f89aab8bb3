"""Arguments that hold several inputs, as the model takes them: dicts, tuples and dataclasses of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from autopar.errors import RunError

Nested = Mapping[str, Any]
"""Argument -> the name of its input, or a dict (by key or attribute) or tuple of such. Empty where every argument is
one input of the same name."""


def flat(nested: Nested, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The call as ((), inputs by name) where some argument holds several inputs, or has another name than its input;
    else `args` and `kwargs` unchanged. Raises RunError where an argument has another structure than was planned."""
    if not any(_holds(value) for value in (*args, *kwargs.values()) if nested) and all(
        nested.get(name, name) == name for name in kwargs
    ):
        return args, kwargs
    if len(args) > len(nested):
        raise RunError(f"got {len(args)} arguments, wanted at most {len(nested)}: {', '.join(nested)}")
    found: dict[str, Any] = {}
    for name, value in [*zip(nested, args, strict=False), *kwargs.items()]:
        inputs = _inputs(nested[name], value, name) if name in nested else {name: value}
        if twice := [other for other in inputs if other in found]:
            raise RunError(f"input {twice[0]!r} is given twice; the plan's arguments are {', '.join(nested)}")
        found |= inputs
    return (), found


def _holds(value: Any) -> bool:
    """Whether a value may hold several inputs."""
    return isinstance(value, (Mapping, tuple, list)) or (is_dataclass(value) and not isinstance(value, (type, Tensor)))


def _inputs(wanted: Any, value: Any, where: str) -> dict[str, Any]:
    """The inputs in `value`, by name; `wanted` is the planned structure (`Nested`), and `where` the path of `value` for
    errors."""
    if isinstance(wanted, str):
        if _holds(value):
            raise RunError(
                f"argument {where} is a {type(value).__name__}, and the plan has one input for it, {wanted!r}: pass "
                "what was planned, or plan the model again with this"
            )
        return {wanted: value}
    parts = _parts(value)
    inner = wanted if isinstance(wanted, Mapping) else dict(enumerate(wanted))
    unlike = [key for key in inner if parts is None or (key not in parts and inner[key] != ())]
    others = [key for key, part in (parts or {}).items() if key not in inner and not _empty(value, part)]
    if parts is None or unlike or others:
        got = f"with {', '.join(map(str, parts))}" if parts else "without parts"
        raise RunError(
            f"argument {where} is a {type(value).__name__} {got}, and the plan was made with "
            f"{', '.join(map(str, inner)) or 'nothing in it'}: "
            "pass what was planned, or plan the model again with this"
        )
    return {
        name: tensor
        for key, described in inner.items()
        if key in parts
        for name, tensor in _inputs(described, parts[key], f"{where}.{key}").items()
    }


def _parts(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key, attribute or position; None where `value` is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    return {field.name: getattr(value, field.name, None) for field in fields(value)} if _holds(value) else None


def _empty(whole: Any, part: Any) -> bool:
    """Whether a part has no inputs: an empty container, or a field of a dataclass that is None."""
    return (_holds(part) and not _parts(part)) or (part is None and is_dataclass(whole))
