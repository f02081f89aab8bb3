"""FLOPs of every call, forward and backward, as formulas in the symbols of the sizes.

One multiply-add is 2 FLOPs. Matmuls and convolutions are exact; pointwise and normalisation ops are bound by memory,
their counts per element (below) only rank them. A matmul's backward is one matmul of the same FLOPs per operand with a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from passes import edit, facts, ops, recurrent
from passes.einsums import sizes_of, spelled
from passes.facts import Size
from passes.grads import needs_grad
from passes.tables import BINARY, UNARY

aten = torch.ops.aten

ATTENTION_BACKWARD = sympy.Rational(5, 2)
"""Five matmuls instead of two: the scores are computed again (Dao et al. 2022, FlashAttention, section 3.1)."""


def annotate_flops(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: a normalized graph; folded bodies are annotated too, per instance.
    does: looks up each op's formula.
    gives: `meta["flops"]` and `meta["backward_flops"]` of every call (int or sympy)."""
    for graph in edit.graphs(gm):
        carries = needs_grad(graph)
        for node in edit.calls(graph):
            node.meta["flops"] = forward_flops(node)
            node.meta["backward_flops"] = _backward(node, carries)
    return gm


def forward_flops(node: fx.Node) -> Size:
    """FLOPs of one forward of the node; a pointwise op without a formula counts 1 per element of its result, any other
    one 0."""
    formula = FLOPS.get(node.target)
    if formula is not None:
        return formula(node)
    if (slow := _slow(node)) is not None:
        return slow[0] * facts.numel(node)
    if node.target in PER_ELEMENT:
        return PER_ELEMENT[node.target] * facts.numel(edit.tensor_operands(node)[0])
    if node.target in UNARY or node.target in BINARY:
        return facts.numel(node)
    return 0


def _backward(node: fx.Node, carries: dict[fx.Node, bool]) -> Size:
    """FLOPs of the backward of the node, for the operands that have gradients (`carries`)."""
    if not carries[node]:
        return 0
    flops: Size = node.meta["flops"]
    if node.target is aten.scaled_dot_product_attention.default:
        return flops * ATTENTION_BACKWARD
    if (slow := _slow(node)) is not None:
        return slow[1] * facts.numel(node) * sum(carries[operand] for operand in edit.tensor_operands(node))
    if node.target in BACKWARD:
        return BACKWARD[node.target](node, carries)
    if node.target in FLOPS:
        operands = edit.tensor_operands(node)
        return flops * sum(
            carries[operands[position]] for position in FACTORS.get(node.target, range(min(2, len(operands))))
        )
    return flops


def _slow(node: fx.Node) -> tuple[int, int] | None:
    """The row of SLOW, and that of an approximated GELU, which computes a tanh."""
    approximated = node.target is aten.gelu.default and edit.args_of(node)["approximate"] == "tanh"
    return TANH_GELU if approximated else SLOW.get(node.target)


def _matmul(node: fx.Node) -> Size:
    """2 k FLOPs per element of the result, k being the last size of the first operand."""
    left = edit.tensor_operands(node)[0]
    return 2 * facts.numel(node) * facts.shape(left)[-1]


def _matmul_added(node: fx.Node) -> Size:
    """As a product, for operators whose first operand is added (addmm)."""
    left = edit.tensor_operands(node)[1]
    return 2 * facts.numel(node) * facts.shape(left)[-1]


def _experts(node: fx.Node) -> Size:
    """Both layers for each of the k rows of a token."""
    _, chosen, _, up, down, *_ = edit.tensor_operands(node)
    (_, wide, inner), (_, narrow, out) = facts.shape(up), facts.shape(down)
    return 2 * facts.numel(chosen) * (wide * inner + narrow * out)


def _convolution(node: fx.Node) -> Size:
    """2 FLOPs per element of the result and per weight of one output channel."""
    weight = edit.tensor_operands(node)[1]
    return 2 * facts.numel(node) * prod(facts.shape(weight)[1:])


def _transposed_convolution(node: fx.Node) -> Size:
    """2 FLOPs per element of the input and per weight of one input channel."""
    data, weight = edit.tensor_operands(node)[:2]
    return 2 * facts.numel(data) * prod(facts.shape(weight)[1:])


def _attention(node: fx.Node) -> Size:
    """For each score 2 d FLOPs (d features of queries), with the batch dims of queries and keys broadcast; and for each
    element of the result 2 k (k keys). Half of both for a causal mask, because fused kernels skip the hidden half."""
    given = edit.args_of(node)
    query, key, value = (facts.shape(given[name]) for name in ("query", "key", "value"))
    lead = [one if one != 1 else other for one, other in zip_longest(query[-3::-1], key[-3::-1], fillvalue=1)]
    total = 2 * key[-2] * (prod(lead) * query[-2] * query[-1] + prod(facts.shape(node)[:-1]) * value[-1])
    return total * sympy.Rational(1, 2) if given["is_causal"] else total


def _einsum(node: fx.Node) -> Size:
    """2 x the product of the sizes of all letters, for two operands (`einsums` leaves no more, and none that sum
    first); 1 x for one."""
    shapes = [facts.shape(operand) for operand in edit.tensor_operands(node)]
    letters, _ = spelled(str(node.args[0]), shapes)
    return max(1, 2 * (len(shapes) - 1)) * prod(sizes_of(letters, shapes).values())


def _power(node: fx.Node) -> Size:
    """matrix_power by repeated squaring: one product per binary digit of the exponent after the first, one more per
    further digit that is set, and an inverse (as one product) for a negative exponent."""
    given = edit.args_of(node)
    exponent = abs(given["n"])
    products = max(0, exponent.bit_length() + exponent.bit_count() - 2) + (given["n"] < 0)
    return 2 * products * facts.numel(node) * facts.shape(node)[-1]


def _cross(node: fx.Node) -> Size:
    """Each element is the difference of two products: 3 FLOPs."""
    return 3 * facts.numel(node)


FLOPS: dict[Any, Callable[[fx.Node], Size]] = {
    aten.addmv.default: _matmul_added,
    aten.bmm.default: _matmul,
    aten.cdist.default: _matmul,
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.default: _convolution,
    aten.conv3d.padding: _convolution,
    aten.conv_transpose1d.default: _transposed_convolution,
    aten.conv_transpose2d.input: _transposed_convolution,
    aten.conv_transpose3d.input: _transposed_convolution,
    aten.dot.default: _matmul,
    aten.einsum.default: _einsum,
    aten.linalg_cross.default: _cross,
    aten.linalg_matrix_power.default: _power,
    aten.linear.default: _matmul,
    ops.affine: _matmul,
    ops.experts: _experts,
    ops.grouped_matmul: _matmul,
    aten.matmul.default: _matmul,
    aten.matrix_power.default: _power,
    aten.mv.default: _matmul,
    aten.scaled_dot_product_attention.default: _attention,
    aten.vdot.default: _matmul,
    **dict.fromkeys(recurrent.GATES, recurrent.flops),
    **dict.fromkeys(recurrent.CELLS, recurrent.cell_flops),
}
"""Operators that are products -> FLOPs of the forward."""

FACTORS: dict[Any, tuple[int, ...]] = {
    aten.addmv.default: (1, 2),
    **dict.fromkeys((aten.linalg_matrix_power.default, aten.matrix_power.default), (0, 0)),
    ops.experts: (0, 3),
}
"""Operators -> the numbers of the operands whose gradients take as many FLOPs each as the forward, where these are not
the first two. Both factors of a power are its one operand."""

BACKWARD: dict[Any, Callable[[fx.Node, Mapping[fx.Node, bool]], Size]] = {
    **dict.fromkeys(recurrent.GATES, recurrent.backward_flops),
    **dict.fromkeys(recurrent.CELLS, recurrent.cell_backward_flops),
}
"""Operators that are several products, each with its own operands -> FLOPs of the backward; the second argument says
which values have gradients."""

PER_ELEMENT: dict[Any, int] = {
    aten.amax.default: 1,
    aten.avg_pool2d.default: 1,
    aten.cumsum.default: 1,
    aten.gelu.default: 8,
    aten.group_norm.default: 8,
    aten.layer_norm.default: 8,
    aten.log_softmax.int: 5,
    aten.max_pool2d.default: 1,
    aten.rms_norm.default: 5,
    aten.silu.default: 5,
    aten.softmax.int: 5,
    aten.sum.default: 1,
    aten.sum.dim_IntList: 1,
    ops.count_valid: 1,
    ops.cross_entropy_each: 6,
    ops.cross_entropy_sum: 6,
    ops.weigh_valid: 2,
}
"""FLOPs per element of the first operand; an exp, division or root counts as one."""

SLOW: dict[Any, tuple[int, int]] = {
    aten.acosh.default: (320, 10),
    aten.asinh.default: (370, 10),
    aten.atan.default: (30, 10),
    aten.atan2.default: (25, 10),
    aten.digamma.default: (200, 220),
    aten.erfc.default: (40, 20),
    aten.erfinv.default: (30, 50),
    aten.fmax.default: (25, 90),
    aten.fmin.default: (25, 90),
    aten.ldexp.Tensor: (40, 20),
    aten.lgamma.default: (100, 200),
    aten.log_sigmoid.default: (25, 5),
    aten.logaddexp.default: (25, 20),
    aten.logaddexp2.default: (25, 45),
    aten.maximum.default: (1, 100),
    aten.minimum.default: (1, 100),
    aten.mish.default: (60, 70),
    aten.pow.Scalar: (40, 5),
    aten.pow.Tensor_Tensor: (40, 60),
    aten.sinc.default: (130, 160),
    aten.softplus.default: (25, 10),
    aten.special_entr.default: (45, 20),
    aten.special_xlog1py.default: (150, 100),
    aten.tan.default: (30, 10),
    aten.tanh.default: (35, 5),
    aten.xlogy.Tensor: (50, 45),
}
TANH_GELU = (27, 30)
"""Pointwise operators that arithmetic or jumps bind and not memory, forward or backward: FLOPs of one element of the
result, and of the gradient of each operand. Measured in a cache, one thread of an AVX-512 server, torch 2.13, a FLOP as
a sixteenth of a nanosecond (cost.compute.CORE_VECTOR_FLOPS): more than about 20 take longer than reading and writing
memory. Random masks of the larger one of two numbers make jumps that no processor foresees."""
