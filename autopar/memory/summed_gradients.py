"""Gradients of sums: an expanded tensor that holds one number, which some backward kernels copy to its full size.
Called by memory.backward.

Most backwards read such a gradient as it is. Those listed here copy it first (`grad.contiguous()`, `expect_contiguous`
or a reshape in their kernels), on every device; those in `ON_CPU` on CPUs only. Tests give each operator that has a
rule such a gradient, and count bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autopar.memory.local import Local
from autopar.rules.arguments import named
from passes import ops

aten = torch.ops.aten


def _always(local: Local) -> bool:
    return True


def _without(operand: int) -> Callable[[Local], bool]:
    """Whether that operand has no gradient."""
    return lambda local: not local.grad(operand)


def _one_row(local: Local) -> bool:
    """Whether a transform to real numbers is along the last dim."""
    return local.given("dim") in (-1, len(local.op.call.ins[0].shape) - 1)


ROWS: dict[Any, Callable[[Local], bool]] = {
    **dict.fromkeys((ops.affine, ops.bag, ops.ragged_bags), _always),
    **dict.fromkeys(
        named("""
        einsum.default linear.default linalg_matrix_power.default lstm.input lstm_cell.default matmul.default
        matrix_power.default
        conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
        conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
        col2im.default grid_sampler.default im2col.default
        log_softmax.int softmax.int
        _weight_norm.default group_norm.default layer_norm.default native_layer_norm.default
        adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default adaptive_max_pool1d.default
        adaptive_max_pool2d.default adaptive_max_pool3d.default
        avg_pool1d.default avg_pool2d.default avg_pool3d.default max_pool1d.default max_pool1d_with_indices.default
        max_pool2d.default max_pool2d_with_indices.default
        max_pool3d.default max_pool3d_with_indices.default max_unpool2d.default max_unpool3d.default
        _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec
        _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec
        upsample_bicubic2d.default upsample_bicubic2d.vec upsample_bilinear2d.default upsample_bilinear2d.vec
        upsample_linear1d.default upsample_linear1d.vec
        upsample_nearest1d.default upsample_nearest1d.vec upsample_nearest2d.default upsample_nearest2d.vec
        upsample_nearest3d.vec upsample_trilinear3d.vec
        reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default replication_pad1d.default
        replication_pad2d.default replication_pad3d.default
        channel_shuffle.default pixel_shuffle.default pixel_unshuffle.default
        embedding.default segment_reduce.default
        fft_fft.default fft_fft2.default fft_fftn.default fft_hfft.default fft_ifft2.default fft_ifftn.default
        fft_irfft2.default fft_irfftn.default
        nanquantile.scalar quantile.scalar"""),
        _always,
    ),
    **dict.fromkeys((aten.tril.default, aten.triu.default), lambda local: len(local.op.call.ins[0].shape) > 2),
    aten.bmm.default: _always,
    aten.cdist.default: _without(1),
    aten.fft_irfft.default: _one_row,
    aten.kl_div.default: lambda local: (
        local.given("reduction") == 0 and not local.given("log_target") and not local.grad(1)
    ),
    aten.masked_scatter.default: lambda local: local.grad(len(local.ins) - 1),
    aten.pad.default: lambda local: local.given("mode") != "constant",
    aten.roll.default: lambda local: not local.given("dims"),
    aten.stft.default: lambda local: not local.given("return_complex"),
    ops.noised: _without(1),
}
"""Operator -> whether its backward copies an expanded gradient, because its kernel reads contiguous rows."""

ON_CPU = frozenset((aten.gelu.default,))
"""Operators that only CPU kernels copy it for."""

BATCHES = frozenset((aten.bmm.default, aten.matmul.default))
"""Products of batches of matrices, which CPUs copy one matrix at a time."""


def made_whole(local: Local, gradient_bytes: float) -> float:
    """Bytes of the copy that a backward makes of its result's gradient: where that has only `gradient_bytes`, fewer
    than the result, and so is the expanded gradient of a sum; else 0."""
    if gradient_bytes >= local.out:
        return 0.0
    wants = ROWS.get(local.op.target)
    if (wants is None or not wants(local)) and not (local.on_cpu and local.op.target in ON_CPU):
        return 0.0
    return local.out / _one_by_one(local)


def _one_by_one(local: Local) -> int:
    """The number of matrices of a batch that a CPU copies one after the other, so that only one copy exists at a time;
    1 where all is copied at once."""
    batched = local.op.target in BATCHES and all(len(each.shape) > 2 for each in local.op.call.ins)
    return math.prod(local.op.call.outs[0].sizes[:-2]) if batched and local.on_cpu else 1
