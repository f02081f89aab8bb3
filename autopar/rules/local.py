"""What the arguments of an operator become on a shard.

Most operators are called on shards with the arguments that they have on one device, because a rule never cuts a dim
that a size argument speaks of. The exceptions are listed here: their size arguments are those of the local output.
"""

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
    """Arguments for a call on one shard, whose outputs have the local shapes `outs` (numbers, or their source
    texts)."""
    kind = SIZED.get(target)
    if kind is None:
        return tuple(args), dict(kwargs)
    if kind == "shape":
        sizes = list(outs[0])
    else:
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        sizes = [shape[dim] for shape in outs]
    return (args[0], sizes, *args[2:]), dict(kwargs)
