"""The arguments of an operator where it is called on a shard.

Most operators take the same arguments on a shard as on one device, because rules never cut a dim whose size is an
argument. The exceptions are in `SIZED`: their size arguments become those of the local output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

SIZED: dict[Any, str] = {
    aten.expand.default: "shape",
    aten.reshape.default: "shape",
    aten.split_with_sizes.default: "pieces",
}
"""Operators whose second argument follows the local outputs: their shape, or the lengths of the pieces."""


def local_args(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Sequence[Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a call on one shard whose outputs have the shapes `outs` (ints, or source texts of sizes)."""
    kind = SIZED.get(target)
    if kind is None:
        return tuple(args), dict(kwargs)
    if kind == "shape":
        sizes = list(outs[0])
    else:
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        sizes = [shape[dim] for shape in outs]
    return (args[0], sizes, *args[2:]), dict(kwargs)
