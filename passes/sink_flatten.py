"""Moves `reshape(x, [-1, h])` from before an operator to after it, where it cancels with its inverse.

A reshape that merges batch and sequence forbids splitting the sequence. Ops that work on the last dim only (a linear, a
softmax over the last dim, a pointwise op with a bias) give the same with and without it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import sympy
import torch
from torch import fx

from passes import edit, facts
from passes.tables import BINARY, CONTRACTIONS, LAST_DIM, UNARY

aten = torch.ops.aten


def sink_flatten(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: contractions without bias, every change of sizes spelled `reshape`.
    does: moves flattening reshapes behind matmuls, pointwise ops, softmaxes, gathers and top-k; cancels reshapes that
           undo each other.
    gives: matmuls that keep batch and sequence apart."""
    for node in edit.calls(gm):
        if _empty(node):
            continue
        if node.target is aten.reshape.default:
            if not merge(node):
                _in_two_steps(node)
        elif node.target in CONTRACTIONS and _one_matrix(node):
            _sink(node, [node.args[0]])
        elif (node.target in UNARY or node.target in BINARY) or (node.target in LAST_DIM and _along_last(node)):
            _sink(node, list(node.all_input_nodes))
        elif _norm_of_last(node) or _keeps_last(node):
            _sink(node, [node.args[0]])
        elif node.target is aten.topk.default:
            _sink_topk(node)
    return edit.finish(gm)


def _empty(node: fx.Node) -> bool:
    """Whether the node gives or reads a tensor without elements, of which -1 does not say the size of a dim."""
    sizes = [size for each in (node, *node.all_input_nodes) for tensor in facts.tensors(each) for size in tensor.shape]
    return any(isinstance(size, int) and not size for size in sizes)


def flattened(node: Any) -> fx.Node | None:
    """`x` when `node` is `reshape(x, [-1, h])` of an N-D `x [..., h]` with N > 2, else None."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    before, after = facts.shape(operand), facts.shape(node)
    return operand if len(after) == 2 < len(before) and before[-1] == after[-1] else None


def _in_two_steps(node: fx.Node) -> None:
    """A reshape of [..., heads, h] or of [..., samples x heads, h] to [-1, heads x h] makes heads one dim with h first,
    and flattens then."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    before, after = facts.shape(operand), facts.shape(node)
    if len(after) != 2 or not before or before[-1] == after[-1]:
        return
    with edit.before(node):
        sizes = _with_last(operand, after[1])
        if sizes is not None:
            merged = edit.call(node, aten.reshape.default, operand, sizes)
            edit.replace(node, edit.call(node, aten.reshape.default, merged, [-1, after[1]]))


def _with_last(operand: fx.Node, last: facts.Size) -> list[int | fx.Node] | None:
    """Sizes, three or more, to which `operand` can be reshaped so that its last dim has size `last` and all in front of
    the one before stay."""
    before = facts.shape(operand)
    for rank in range(len(before) - 1, 1, -1):
        inner = before[rank:]
        if not isinstance(last, int) or not all(isinstance(size, int) for size in inner) or last % math.prod(inner):
            return None
        times = last // math.prod(inner)
        if times == 1:
            return [*(edit.size(operand, dim) for dim in range(rank)), last]
        left = sympy.cancel(sympy.sympify(before[rank - 1]) / times)
        if left != 1 and sympy.fraction(left)[1] == 1:
            return [*(edit.size(operand, dim) for dim in range(rank - 1)), -1, last]
    return None


def _one_matrix(node: fx.Node) -> bool:
    """Whether the second operand is a matrix, the same for all rows, and not the rows themselves (products of all pairs
    of rows): it stays flattened."""
    rows, weight = node.args[:2]
    return isinstance(weight, fx.Node) and facts.rank(weight) == 2 and weight is not rows


def _along_last(node: fx.Node) -> bool:
    """Whether `node` works along the last dim."""
    return node.args[1] in (-1, 1)


def _sink(node: fx.Node, operands: list[Any]) -> None:
    """Applies `node` to the unflattened operands; all that are not flattened must broadcast along the last dim."""
    sources = {operand: flattened(operand) for operand in operands if facts.is_tensor(operand)}
    found = {operand: source for operand, source in sources.items() if source is not None}
    if not found or len({facts.shape(source)[:-1] for source in found.values()}) != 1:
        return
    if any(source is None and facts.rank(operand) > 1 for operand, source in sources.items()):
        return
    args = fx.map_arg(node.args, lambda n: found.get(n, n))
    if node.target in LAST_DIM:
        args = (args[0], -1, *args[2:])
    if node.target is aten.sum.dim_IntList:
        args = (args[0], [-1], *args[2:])
    with edit.before(node):
        new = edit.call(node, node.target, *args, **node.kwargs)
        last = edit.size(new, -1)
        flat = edit.call(node, aten.reshape.default, new, [-1, last])
    edit.replace(node, flat)


def _norm_of_last(node: fx.Node) -> bool:
    """Whether a norm is over the last dim alone."""
    return node.target is aten.layer_norm.default and len(node.args[1]) == 1  # type: ignore[arg-type]


def _keeps_last(node: fx.Node) -> bool:
    """Whether `node` is a sum over the last dim of a matrix, which stays as a dim of size 1."""
    if node.target is not aten.sum.dim_IntList:
        return False
    given = edit.args_of(node)
    return given["keepdim"] and list(given["dim"] or ()) in ([-1], [1]) and facts.rank(node.args[0]) == 2


def _sink_topk(node: fx.Node) -> None:
    """As `_sink`, for both results: values and their positions."""
    source, given = flattened(node.args[0]), edit.args_of(node)
    if source is None or given["dim"] not in (-1, 1):
        return
    with edit.before(node):
        new = edit.call(node, node.target, source, given["k"], -1, given["largest"], given["sorted"])
    for user in list(node.users):
        with edit.before(user):
            part = edit.call(user, operator.getitem, new, user.args[1])
            edit.replace(user, edit.call(user, aten.reshape.default, part, [-1, given["k"]]))
    node.graph.erase_node(node)


def merge(node: fx.Node) -> bool:
    """Remove the reshape `node` where a reshape before it had the same sizes, with only reshapes between. Where only
    dims of size 1 differ (one head), the operand of `node` becomes the earlier tensor. Returns whether something
    changed."""
    operand = node.args[0]
    while isinstance(operand, fx.Node):
        if facts.shape(operand) == facts.shape(node):
            edit.replace(node, operand)
            return True
        if operand is not node.args[0] and _sizes_above_one(operand) == _sizes_above_one(node):
            node.update_arg(0, operand)
            return True
        operand = operand.args[0] if operand.target is aten.reshape.default else None
    return False


def _sizes_above_one(node: fx.Node) -> list[facts.Size]:
    """The sizes that are not 1."""
    return [size for size in facts.shape(node) if size != 1]
