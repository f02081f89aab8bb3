"""Fake quantisation (`torch.fake_quantize_per_tensor_affine` and its variants), decomposed into common operators. Used
by composed.

    n = round(x / scale) + zero_point            # of values alone
    y = (clamp(n) - zero_point) * scale          # whose gradient is that of x where n is in range

Torch's kernels accept only float32 scales, and have no rule by which they could be split.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def _of_one(node: fx.Node) -> fx.Node | None:
    """One scale for the whole tensor: a Python number, which the kernel takes in float32, or a tensor of one
    element."""
    given = edit.args_of(node)
    scale, zero = given["scale"], given["zero_point"]
    if isinstance(scale, fx.Node):
        return (
            None
            if facts.dtype(zero).is_floating_point
            else _written(
                node, given, *(_shaped(_values(each, node), [1] * facts.rank(node), node) for each in (scale, zero))
            )
        )
    return _written(node, given, _single(scale), zero)


def _of_channels(node: fx.Node) -> fx.Node | None:
    """One scale per index along a dim."""
    given = edit.args_of(node)
    if facts.dtype(given["zero_point"]).is_floating_point:
        return None  # another formula: added before rounding
    along = [-1 if dim == given["axis"] else 1 for dim in range(facts.rank(node))]
    return _written(
        node, given, *(_shaped(_values(given[name], node), along, node) for name in ("scale", "zero_point"))
    )


def _written(node: fx.Node, given: dict[str, Any], scale: fx.Node | float, zero: fx.Node | int) -> fx.Node:
    """The formula. Where n is in range, `x - x.detach()` is added, which is zero and has the gradient of `x`."""
    do, operand, dtype = partial(edit.call, node), given["self"], facts.dtype(node)
    values = _values(operand, node)
    wide = do(aten.to.dtype, values, torch.float32) if dtype.itemsize < 4 else values
    inverse = do(aten.reciprocal.default, scale) if isinstance(scale, fx.Node) else _single(1 / scale)
    number = do(aten.add.Tensor, do(aten.round.default, do(aten.mul.Tensor, wide, inverse)), zero)
    within = do(
        aten.logical_and.default,
        do(aten.ge.Scalar, number, given["quant_min"]),
        do(aten.le.Scalar, number, given["quant_max"]),
    )
    held = do(aten.sub.Tensor, do(aten.clamp.default, number, given["quant_min"], given["quant_max"]), zero)
    return do(
        aten.add.Tensor,
        edit.cast(do(aten.mul.Tensor, held, scale), dtype, like=node),
        do(aten.masked_fill.Scalar, do(aten.sub.Tensor, operand, values), do(aten.logical_not.default, within), 0.0),
    )


def _values(operand: fx.Node, node: fx.Node) -> fx.Node:
    """The operand without its gradient."""
    return edit.call(node, aten.detach.default, operand)


def _shaped(operand: fx.Node, sizes: list[int], node: fx.Node) -> fx.Node:
    """The operand reshaped to `sizes`."""
    return edit.call(node, aten.reshape.default, operand, sizes)


def _single(number: float) -> float:
    """The float32 nearest to a number."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


FAKE_QUANTIZED: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.fake_quantize_per_channel_affine.default: _of_channels,
    aten.fake_quantize_per_tensor_affine.default: _of_one,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: _of_one,
}
"""Operators that `passes.composed` replaces by these."""
