"""Fake quantisation (`torch.fake_quantize_per_tensor_affine` and its variants), decomposed into common operators. Used
by composed.

    n = round(x / scale) + zero_point            # of values alone
    y = (clamp(n) - zero_point) * scale          # whose gradient is that of x where n is in range

Torch's kernels accept only float32 scales, and have no rule by which they could be split.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _of_number(x: Tensor, scale: float, zero: int, low: int, high: int) -> Tensor:
    """One scale for the whole tensor, a Python number, which the kernel takes in float32."""
    return _quantized(x, c_float(scale).value, c_float(1 / c_float(scale).value).value, zero, low, high)


def _of_tensor(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor | None:
    """One scale for the whole tensor, a tensor of one element."""
    return _shaped(x, scale, zero, [1] * x.dim(), low, high)


def _of_channels(x: Tensor, scale: Tensor, zero: Tensor, axis: int, low: int, high: int) -> Tensor | None:
    """One scale per index along a dim."""
    return _shaped(x, scale, zero, [-1 if dim == axis else 1 for dim in range(x.dim())], low, high)


def _shaped(x: Tensor, scale: Tensor, zero: Tensor, sizes: list[int], low: int, high: int) -> Tensor | None:
    if zero.is_floating_point():
        return None  # another formula: added before rounding
    scale, zero = scale.detach().reshape(sizes), zero.detach().reshape(sizes)
    return _quantized(x, scale, scale.reciprocal(), zero, low, high)


def _quantized(
    x: Tensor, scale: Tensor | float, inverse: Tensor | float, zero: Tensor | int, low: int, high: int
) -> Tensor:
    """The formula. Where n is in range, `x - x.detach()` is added, which is zero and has the gradient of `x`."""
    values = x.detach()
    wide = values.float() if x.dtype.itemsize < 4 else values
    number = (wide * inverse).round() + zero
    within = (number >= low) & (number <= high)
    held = number.clamp(low, high) - zero
    return (held * scale).to(x.dtype) + (x - values).masked_fill(~within, 0.0)


FAKE_QUANTIZED: dict[Any, Callable[..., Tensor | None]] = {
    aten.fake_quantize_per_channel_affine.default: _of_channels,
    aten.fake_quantize_per_tensor_affine.default: _of_number,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: _of_tensor,
}
"""Operators -> the same with common ones."""
