"""Moves a reshape that splits rows from behind pointwise operators to before them, where it undoes an earlier merge.

Experts that all see all tokens are written `(tokens.repeat(e, 1) * gates.reshape(-1, 1)).reshape(e, -1, d)`: in
between, experts and tokens share one dim, and neither can be split. With `expand` for `repeat` and sizes `[e, n, d]`
throughout, both can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.tables import BINARY, UNARY

aten = torch.ops.aten


def rows_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: every change of sizes spelled `reshape`.
    does: finds `reshape(x, [e, n, ...])` where `x [e * n, ...]` is made by pointwise operators from values that were
           `[e, n, ...]` before, or that are `[n, ...]` repeated e times; applies these operators to the unmerged values
           instead.
    gives: no reshapes that merge rows only for pointwise operators."""
    for node in edit.calls(gm, aten.reshape.default):
        source, shape = node.args[0], facts.shape(node)
        merged = isinstance(source, fx.Node) and facts.shape(source)[1:] == shape[2:] and len(shape) > 2
        if merged and _pointwise(source) and _apart(source, shape[0], shape[1]):  # type: ignore[arg-type]
            edit.replace(node, _made(source, shape[0], shape[1]))  # type: ignore[arg-type]
    return edit.finish(gm)


def _pointwise(node: Any) -> bool:
    """Whether `node` is a pointwise operator that works on rows of any shape."""
    return (
        isinstance(node, fx.Node)
        and (node.target in UNARY or node.target in BINARY)
        and node.target is not aten.dropout.default
    )


def _apart(node: fx.Node, first: Any, second: Any) -> bool:
    """Whether the rows of `node` are known to be `first` times `second` rows, merged."""
    if not isinstance(first, int) or any(not isinstance(size, int) for size in facts.shape(node)[1:]):
        return False
    if _pointwise(node):
        rank = facts.rank(node)
        return all(
            facts.rank(operand) < rank or _apart(operand, first, second) for operand in edit.tensor_operands(node)
        )
    if node.target is aten.reshape.default:
        return facts.shape(node.args[0])[:2] == (first, second)  # type: ignore[arg-type]
    return _times(node) == first and facts.shape(node.args[0])[0] == second  # type: ignore[arg-type]


def _times(node: fx.Node) -> Any:
    """How many copies of its operand's rows `node` concatenates; 0 where it is something else."""
    if node.target is not aten.repeat.default:
        return 0
    times: Any = node.args[1]
    return times[0] if len(times) == facts.rank(node.args[0]) and all(n == 1 for n in times[1:]) else 0


def _made(node: fx.Node, first: int, second: Any) -> fx.Node:
    """`node` with its rows as two dims, inserted before it."""
    rest = list(facts.shape(node)[1:])
    with edit.before(node):
        if node.target is aten.reshape.default:
            source: Any = node.args[0]
            whole = facts.shape(source) == (first, second, *rest)
            return source if whole else edit.call(node, aten.reshape.default, source, [first, -1, *rest])
        if node.target is aten.repeat.default:
            one = edit.call(node, aten.unsqueeze.default, node.args[0], 0)
            return edit.call(node, aten.expand.default, one, [first, -1, *([-1] * len(rest))])
    rank = len(rest) + 1
    args = tuple(
        _made(arg, first, second) if isinstance(arg, fx.Node) and facts.rank(arg) == rank else arg for arg in node.args
    )
    with edit.before(node):
        return edit.call(node, node.target, *args, **node.kwargs)
