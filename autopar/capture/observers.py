"""Quantisation-aware training: what torch's fused observers do in one operator, while a model is traced, with common
ones. Used by devices.

    low, high    averages of the least and the largest value of each batch, in buffers
    scale, zero  the numbers that map [low, high] onto [quant_min, quant_max], in buffers
    y            fake_quantize(x, scale, zero)

Whether it observes, and whether it quantises, is said by buffers, and read when the program runs
(`torch.ao.quantization.disable_observer`). The numbers are those of torch's kernel for CPUs
(aten/src/ATen/native/quantized/cpu/fused_obs_fake_quant.cpp, and ChooseQuantizationParams in QuantUtils.h).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from autopar.capture.lines import caller
from autopar.errors import CaptureError

SMALLEST_SCALE = 6.1e-5
"""SMALL_SCALE_THRESHOLD of QuantUtils.h."""
OF_NOTHING = 0.1
"""The scale where all values are zero."""


@contextmanager
def plain_observers() -> Iterator[None]:
    """A context in which modules of torch.ao.quantization that observe and quantise in one (the fused ones, which
    `get_default_qat_qconfig` has) do so with common operators."""
    with mock.patch.object(torch, "fused_moving_avg_obs_fake_quant", _observed):
        yield


def _observed(
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Tensor:
    """As torch.fused_moving_avg_obs_fake_quant. Raises CaptureError where buffers do not have their sizes yet."""
    if per_row_fake_quant and running_min.numel() == 0:
        raise CaptureError(
            f"{caller()}: an observer of channels has buffers of no elements, which get {x.shape[ch_axis]} in the "
            "first step, and a graph has buffers of one size: run the model on one batch before it is compiled"
        )
    observes, quantises = (flag.reshape(()) != 0 for flag in (observer_on, fake_quant_on))
    rest = [dim for dim in range(x.dim()) if not per_row_fake_quant or dim != ch_axis % x.dim()]
    seen = x.detach().to(running_min.dtype)
    for running, found in ((running_min, seen.amin(rest)), (running_max, seen.amax(rest))):
        found = found.reshape(running.shape)
        moved = torch.where(running.isinf(), found, running + averaging_const * (found - running))
        running.copy_(torch.where(observes, moved, running))
    chosen_scale, chosen_zero = _chosen(running_min, running_max, quant_min, quant_max, symmetric_quant)
    for buffer, chosen in ((scale, chosen_scale), (zero_point, chosen_zero)):
        buffer.copy_(torch.where(quantises, chosen.reshape(buffer.shape).to(buffer.dtype), buffer))
    quantised = (
        torch.fake_quantize_per_channel_affine(x, scale, zero_point, ch_axis, quant_min, quant_max)
        if per_row_fake_quant
        else torch.fake_quantize_per_tensor_affine(x, scale, zero_point, quant_min, quant_max)
    )
    return torch.where(quantises, quantised, x)


def _chosen(low: Tensor, high: Tensor, quant_min: int, quant_max: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point for values from `low` to `high`, of their sizes: ChooseQuantizationParams."""
    both = (low < 0) & (high > 0) & symmetric
    half = (quant_max - quant_min) // 2
    widest = torch.maximum((low / -(half + 1)).abs(), (high / half).abs()).double()
    low = torch.where(both, (widest * -(half + 1)).to(low.dtype), low).clamp(max=0)
    high = torch.where(both, (widest * half).to(high.dtype), high).clamp(min=0)
    wide = (high.double() - low.double()) / (quant_max - quant_min)
    single = wide.float()
    wide = torch.where((single == 0) | (1 / single).isinf(), OF_NOTHING, wide)
    small = wide < SMALLEST_SCALE
    least, most = _widened(low, high, wide, quant_max - quant_min)
    wide = torch.where(small, SMALLEST_SCALE, wide)
    low, high = torch.where(small, least, low).double(), torch.where(small, most, high).double()
    of_low, of_high = quant_min - low / wide, quant_max - high / wide
    closer = abs(quant_min) - (low / wide).abs() < abs(quant_max) - (high / wide).abs()
    zero = torch.where(both, (quant_min + quant_max) / 2, torch.where(closer, of_low, of_high))
    return wide, zero.clamp(quant_min, quant_max).round()


def _widened(low: Tensor, high: Tensor, scale: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`low` and `high` for the smallest scale, where `scale` is less."""
    times = (SMALLEST_SCALE / scale.float()).to(low.dtype)
    return (
        torch.where(low == 0, low, torch.where(high == 0, -SMALLEST_SCALE * steps, low * times)),
        torch.where(low == 0, SMALLEST_SCALE * steps, torch.where(high == 0, high, high * times)),
    )
