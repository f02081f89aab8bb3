"""Matmuls without bias, and N-D instead of flattened.

`linear(x, w, b)` becomes `linear(x, w) + b`, `addmm` becomes `matmul + b`, a convolution likewise, so that later passes
see one form of each. `biases` puts those of linear layers back at the end. A convolution's stays apart: where it is
split over ranks it gives partial sums, and a bias inside would be added once per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def matmul(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops in the plain spelling.
    does: splits the bias off linear, addmm, baddbmm and convolutions; mm becomes matmul, or linear of a transpose.
    gives: contractions without bias."""
    return edit.rewrite(gm, SPLITS)


def _linear(node: fx.Node) -> fx.Node | None:
    """A linear without its bias, which is added after it."""
    given = edit.args_of(node)
    if given["bias"] is None:
        return None
    product = edit.call(node, aten.linear.default, given["input"], given["weight"])
    return added(node, product, given["bias"])


def _mm(node: fx.Node) -> fx.Node:
    """`mm` as a matmul, or as a linear of a transpose."""
    return _product(node, node.args[0], node.args[1])


def _matmul(node: fx.Node) -> fx.Node | None:
    """A matmul with a transposed matrix as a linear."""
    return None if _transposed(node.args[1]) is None else _product(node, node.args[0], node.args[1])


def _product(node: fx.Node, left: Any, right: Any) -> fx.Node:
    """`left @ right`, as a linear when `right` is a transposed matrix."""
    weight = _transposed(right)
    if weight is not None:
        return edit.call(node, aten.linear.default, left, weight)
    return edit.call(node, aten.matmul.default, left, right)


def _transposed(node: Any) -> fx.Node | None:
    """The matrix that `node` is the transpose of, if it is one."""
    if not isinstance(node, fx.Node) or facts.rank(node) != 2:
        return None
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    operand = node.args[0]
    return operand if isinstance(operand, fx.Node) else None


def _addmm(node: fx.Node) -> fx.Node:
    """beta * bias + alpha * product as separate operators."""
    given = edit.args_of(node)
    product = _product(node, given["mat1"], given["mat2"])
    return added(node, scaled(node, product, given["alpha"]), given["self"], given["beta"])


def _baddbmm(node: fx.Node) -> fx.Node:
    """As `_addmm`, for batches of matrices."""
    given = edit.args_of(node)
    product = edit.call(node, aten.bmm.default, given["batch1"], given["batch2"])
    return added(node, scaled(node, product, given["alpha"]), given["self"], given["beta"])


def _convolution(node: fx.Node) -> fx.Node | None:
    """A convolution without its bias, which is added after it."""
    given = edit.args_of(node)
    bias = given["bias"]
    if bias is None:
        return None
    args, kwargs = edit.given_by_name(node, {**given, "bias": None})
    result = edit.call(node, node.target, *args, **kwargs)
    spatial = facts.rank(given["weight"]) - 2
    channels = edit.call(node, aten.reshape.default, bias, [-1] + [1] * spatial)
    return added(node, result, channels)


def scaled(node: fx.Node, value: Any, factor: Any) -> Any:
    """`value` times `factor`, a number or one of the graph, in front of `node`."""
    if not isinstance(factor, fx.Node) and factor == 1:
        return value
    return edit.call(node, aten.mul.Tensor, value, factor)


def added(node: fx.Node, value: fx.Node, bias: Any, factor: Any = 1) -> fx.Node:
    """`value` and `bias`, as often as `factor` says, in front of `node`."""
    if not isinstance(factor, fx.Node) and factor == 0:
        return value
    return edit.call(node, aten.add.Tensor, value, scaled(node, bias, factor))


SPLITS: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv3d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.padding: _convolution,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _mm,
}
"""Contractions -> a function that writes a call without bias; None: the call stays."""
