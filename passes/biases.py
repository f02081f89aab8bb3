"""Fuses the biases of linear layers into the kernels of their matmuls.

Earlier passes see a bias as an addition, so that patterns of matmuls (experts, heads, parts of fused weights) are
recognised with and without it. A separate addition reads and writes the whole result once more, which `linear` with a
bias avoids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops

aten = torch.ops.aten

JOINED: dict[Any, Any] = {aten.linear.default: aten.linear.default, aten.matmul.default: ops.affine}
"""Product -> the operator that is the product plus a bias, its third argument."""


def biases(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: contractions without bias; no later pass looks for these.
    does: `linear(x, w) + b` becomes `linear(x, w, b)`, and `x @ w + b` with a matrix w `affine(x, w, b)`, where b is a
           vector and the product has no other reader.
    gives: linear layers in the form that torch runs fastest. Where ranks have partial sums, one of them adds the bias
           (autopar.rules)."""
    for node in edit.calls(gm, aten.add.Tensor):
        found = _product_and_bias(node)
        if found is not None:
            product, bias = found
            node.prepend(product)  # the bias may be made behind it
            product.target, product.args = JOINED[product.target], (*product.args, bias)
            edit.replace(node, product)
    return edit.finish(gm)


def _product_and_bias(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The linear layer and the vector that `node` is the sum of, if it is one."""
    given = edit.args_of(node)
    operands = given["self"], given["other"]
    if given["alpha"] != 1 or not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    return next((pair for pair in (operands, operands[::-1]) if _fit(*pair, node)), None)


def _fit(product: fx.Node, bias: fx.Node, total: fx.Node) -> bool:
    """Whether `bias` is a vector that can be the bias of `product`, and `total` has the product's sizes and dtype."""
    return (
        product.target in JOINED
        and len(product.args) == 2
        and len(product.users) == 1
        and _by_matrix(product)
        and facts.shape(bias) == facts.shape(product)[-1:]
        and facts.kind(total) == facts.kind(product)
        and facts.dtype(bias) == facts.dtype(product)
    )


def _by_matrix(product: fx.Node) -> bool:
    """Whether rows are multiplied by one matrix, not vectors or matrices each by its own."""
    rows, weight = edit.tensor_operands(product)
    return facts.rank(rows) > 1 and facts.rank(weight) == 2
