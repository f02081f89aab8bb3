"""Permutations and casts of weights as arguments of `gather`, which applies them to the shard before it gathers
(runtime.turns)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.problem.graph import CAST, Op

aten = torch.ops.aten


def turned(ops: Sequence[Op]) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
    """The combined effect of a chain of operators of `problem.graph.TURNS`: the permutation of dims (() for none), and
    the dtypes of casts in order."""
    count = len(ops[0].call.ins[0].shape) if ops else 0
    dims, casts = list(range(count)), list[torch.dtype]()
    for op in ops:
        args: tuple[Any, ...] = op.node.args[1:]
        if op.target is CAST:
            casts.append(op.out_dtypes[0])
        elif op.target is aten.permute.default:
            dims = [dims[d] for d in args[0]]
        else:
            first, second = args if op.target is aten.transpose.int else (0, count - 1)
            dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims) if dims != list(range(count)) else (), tuple(casts)


def turn_text(ops: Sequence[Op]) -> str:
    """`turned(ops)` as further arguments of a call."""
    dims, casts = turned(ops)
    dtypes = "".join(f"{dtype}, " for dtype in casts)
    return (f", dims={dims}" if dims else "") + (
        f", casts=({dtypes.rstrip() if len(casts) == 1 else dtypes.rstrip(', ')})" if casts else ""
    )
