"""What the backward keeps of a cluster's forward: each tensor once, however many operators keep it.

Autograd keeps storages, not tensors: a view keeps what it looks at, and a value that several operators keep is one value.
So every kept tensor is followed back through views to the value that owns the bytes (its *owner*): either a value made
inside the cluster, or one that comes in from another cluster, whose net counts it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op, Program, Ref
from passes import facts
from passes.annotate_memory import is_view

aten = torch.ops.aten
HOLDERS = ("param", "buffer", "constant", "input")
"""Roles of values that are in memory for the whole step, whoever keeps them."""


@dataclass(eq=False, slots=True)
class Kept:
    """Of one cluster: `own` are the values made inside that are kept; `reads` the (op name, operand) at which kept values
    come in."""

    own: list[Ref] = field(default_factory=list)
    reads: list[tuple[str, int]] = field(default_factory=list)


def kept(cluster: Cluster, program: Program) -> Kept:
    """What the members of `cluster` keep, each value once, in member order."""
    found = Kept()
    inner = {op.name: op for op in cluster.members}
    for op in cluster.members:
        for index in op.saves:
            if index >= len(op.operands):
                ref, edge = _inside((op.name, index - len(op.operands)), inner)
            elif op.operands[index][0] in inner:
                ref, edge = _inside(op.operands[index], inner)
            else:
                ref, edge = op.operands[index], (op.name, index)
            if edge is not None and edge not in found.reads:
                found.reads.append(edge)
            if edge is None and ref not in found.own and program.ops[ref[0]].role not in HOLDERS:
                found.own.append(ref)
    return found


def _inside(ref: Ref, inner: Mapping[str, Op]) -> tuple[Ref, tuple[str, int] | None]:
    """The owner of a value made inside, and where it comes in if it is not made inside itself."""
    op = inner[ref[0]]
    while looks(op):
        ref = op.operands[0]
        if ref[0] not in inner:
            return ref, (op.name, 0)
        op = inner[ref[0]]
    return ref, None


def looks(op: Op) -> bool:
    """Whether the results of `op` are views of its first operand."""
    return op.role == "op" and bool(op.operands) and op.node.target is not operator.getitem and (is_view(op.node) or _joins_heads(op.node))


def _joins_heads(node: fx.Node) -> bool:
    """Whether `node` joins the heads of an attention's result without a copy.

    The fused kernels write their result in the order of the query's memory (`empty_like`), which graphs traced without a
    device do not show: for a query laid out [b, s, h, d] the transposed result is contiguous.
    """
    turned = node.args[0] if node.target is aten.reshape.default else None
    made = turned.args[0] if isinstance(turned, fx.Node) and turned.target is aten.transpose.int else None
    if not isinstance(made, fx.Node) or made.target is not aten.scaled_dot_product_attention.default:
        return False
    (query,) = facts.tensors(made.args[0]) if isinstance(made.args[0], fx.Node) else (None,)
    head, row = query.stride()[1:3] if query is not None and query.dim() == 4 else (0, 0)
    return isinstance(head, int) and isinstance(row, int) and head < row
