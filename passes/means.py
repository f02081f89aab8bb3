"""Means as sum over number, so that a mean over a split dim is a partial sum and one division."""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def means(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: `mean` over dims or all becomes `sum` divided by the number of elements, symbolic where sizes are.
    gives: no means. In float16 the sum is taken in float32, as it may leave float16's range."""
    return edit.rewrite(gm, dict.fromkeys((aten.mean.default, aten.mean.dim), _quotient))


def _quotient(node: fx.Node) -> fx.Node:
    """One mean as a sum divided by the number of its elements."""
    given = edit.args_of(node)
    operand: fx.Node = given["self"]
    rank = facts.rank(operand)
    # a tensor of no dims has a last one, too
    dims = [dim % rank for dim in given.get("dim") or range(rank)] if rank else []
    result = facts.dtype(node)
    narrow = result == torch.float16
    keywords = {"dtype": torch.float32} if narrow else {"dtype": given["dtype"]} if given["dtype"] else {}
    args = (operand, dims, given.get("keepdim", False))
    total = edit.call(node, aten.sum.dim_IntList, *args, **keywords)
    count = edit.product(node, [edit.size(operand, dim) for dim in dims])
    mean = edit.call(node, aten.div.Tensor, total, count)
    return edit.cast(mean, result, like=node)
