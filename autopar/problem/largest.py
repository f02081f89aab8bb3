"""The largest parameters of a program, for the message that a model does not fit (onestage)."""

from __future__ import annotations

import math

from autopar.problem.graph import Op, Program
from autopar.text import gibibytes


def largest(program: Program, count: int = 5) -> list[str]:
    """The `count` parameters with the most bytes, all instances of a block together: full name, instances and bytes of
    the weight alone (gradients and optimizer state come on top)."""
    params = [op for op in program.ops.values() if op.role == "param"]
    return [_line(op) for op in sorted(params, key=lambda op: (-_bytes(op), op.name))[:count]]


def _line(op: Op) -> str:
    names = list(op.node.meta.get("fqns") or (op.fqn,))
    size = _bytes(op)
    if len(names) == 1:
        return f"{names[0]} {gibibytes(size)}"
    return f"{names[0]} ... {names[-1]} ({len(names)} alike, {gibibytes(size / len(names))} each) {gibibytes(size)}"


def _bytes(op: Op) -> float:
    return math.prod(op.call.outs[0].sizes) * op.out_dtypes[0].itemsize * op.count
