"""Which operators return views: these keep no storage of their own (problem.saved, autopar.memory)."""

from __future__ import annotations

import operator

from autopar.problem.graph import Op
from passes.annotate_memory import is_view


def makes_view(op: Op) -> bool:
    """Whether the results of `op` are views of its first operand."""
    return op.role == "op" and bool(op.operands) and op.node.target is not operator.getitem and is_view(op.node)
