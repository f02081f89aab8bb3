"""Operators whose results are views."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.problem.graph import Op
from passes import facts
from passes.annotate_memory import is_view

aten = torch.ops.aten


def looks(op: Op) -> bool:
    """Whether the results of `op` are views of its first operand."""
    return op.role == "op" and bool(op.operands) and op.node.target is not operator.getitem and (is_view(op.node) or joins_heads(op.node))


def joins_heads(node: fx.Node) -> bool:
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
