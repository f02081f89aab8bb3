"""The arguments of an operator where it is called on a shard.

Most operators take the same arguments on a shard as on one device, because rules never cut a dim whose size is an
argument. The exceptions are in `SIZED`, whose size arguments become those of the local output, and convolutions, of
which a rank may have some of the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

SIZED: dict[Any, str] = {
    aten.expand.default: "shape",
    aten.reshape.default: "shape",
    aten.split_with_sizes.default: "pieces",
}
"""Operators whose second argument follows the local outputs: their shape, or the lengths of the pieces."""


@cache
def groups_at(target: Any) -> int | None:
    """The position of the number of groups among the arguments of a convolution; None for other operators."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::conv"):
        return None
    return [argument.name for argument in schema.arguments].index("groups")


def with_groups(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], groups: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a convolution with another number of groups."""
    at = groups_at(target)
    if at is None or at >= len(args):
        return tuple(args), {**kwargs, "groups": groups}
    return (*args[:at], groups, *args[at + 1 :]), dict(kwargs)


def local_args(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Sequence[Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a call on one shard whose outputs have the shapes `outs` (ints, or source texts of sizes)."""
    kind = SIZED.get(target)
    if (at := groups_at(target)) is not None and (*args[at:], kwargs.get("groups", 1))[0] != 1:
        weight = args[1]
        of_groups = outs[0] if "transpose" in target._schema.name else args[0].shape
        return with_groups(target, args, kwargs, of_groups[1 - weight.dim()] // weight.shape[1])
    if kind is None:
        return tuple(args), dict(kwargs)
    if kind == "shape":
        sizes = list(outs[0])
    else:
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        sizes = [shape[dim] for shape in outs]
    return (args[0], sizes, *args[2:]), dict(kwargs)
