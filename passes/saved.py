"""Which tensors autograd keeps from forward to backward, one table entry per operator. Used by annotate_memory.

A row gives positions among (tensor operands..., results...): `OUT` is the first result, `SECOND` the next, `THIRD` the
one behind it. Taken from torch's derivatives.yaml and checked against `saved_tensors_hooks` in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes import ops
from passes.saved_rows import (
    OUT,
    SECOND,
    THIRD,
    Row,
    added_product,
    attention,
    bags,
    cell,
    crosswise,
    every,
    fixed,
    graded,
    index_operands,
    last_result,
    put,
    quotient,
    recurrent,
)
from passes.tables import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward of one call keeps: `positions` among operands and results, `copies` of operands (where the
    kernel reorders or scales these first), and `extra_bytes` for masks, statistics and indices."""

    positions: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    extra_bytes: Any = 0  # int or sympy expression


NOTHING, RESULT, OPERAND = fixed(), fixed(OUT), fixed(0)

MOVES = (
    aten.channel_shuffle.default, aten.constant_pad_nd.default, aten.fft_fft2.default,
    aten.fft_fftn.default,
    aten.fft_ifft2.default, aten.fft_ifftn.default, aten.fft_irfft.default, aten.fft_irfft2.default,
    aten.fft_irfftn.default, aten.flip.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.repeat.default, aten.roll.default,
    aten.select_scatter.default, aten.slice_scatter.default, aten.stack.default, aten.tril.default, aten.triu.default,
    aten.view_as_real.default, ops.as_complex,
)  # fmt: skip
"""Operators that copy elements to other positions, change signs, or sum with known factors (Fourier transforms)."""

LINEAR = tuple(
    getattr(getattr(aten, name), overload)
    for name, overloads in {
        "_upsample_bicubic2d_aa": "vec",
        "_upsample_bilinear2d_aa": "vec",
        "_upsample_nearest_exact1d": "vec",
        "_upsample_nearest_exact2d": "vec",
        "_upsample_nearest_exact3d": "vec",
        "add": "Scalar",
        "ceil": "default",
        "col2im": "default",
        "conj_physical": "default",
        "deg2rad": "default",
        "diag": "default",
        "diag_embed": "default",
        "diagonal_scatter": "default",
        "div": "Scalar Scalar_mode",
        "fft_hfft": "default",
        "floor": "default",
        "fmod": "Scalar",
        "frac": "default",
        "im2col": "default",
        "lerp": "Scalar",
        "mul": "Scalar",
        "rad2deg": "default",
        "remainder": "Scalar",
        "round": "default decimals",
        "rsub": "Tensor",
        "sign": "default",
        "sub": "Scalar",
        "trace": "default",
        "trunc": "default",
        "upsample_bicubic2d": "default vec",
        "upsample_bilinear2d": "default vec",
        "upsample_linear1d": "default vec",
        "upsample_nearest1d": "default vec",
        "upsample_nearest2d": "default vec",
        "upsample_nearest3d": "vec",
        "upsample_trilinear3d": "vec",
    }.items()
    for overload in overloads.split()
)
"""Operators whose gradient needs only sizes and numbers."""

CHOOSING = (
    aten.kthvalue.default, aten.max.dim, aten.median.dim, aten.min.dim, aten.mode.default, aten.nanmedian.dim,
    aten.native_dropout.default, aten.sort.default,
    aten.sort.stable, aten.topk.default,
)  # fmt: skip
"""Operators that keep which elements they chose."""

WITH_RESULT = (
    aten.amax.default, aten.amin.default, aten.copysign.Scalar, aten.copysign.Tensor, aten.cumprod.default,
    aten.float_power.Scalar,
    aten.linalg_vector_norm.default, aten.logcumsumexp.default, aten.logsumexp.default, aten.max.default,
    aten.median.default, aten.min.default, aten.norm.Scalar,
    aten.norm.ScalarOpt_dim, aten.pow.Scalar, aten.prod.default, aten.prod.dim_int, aten.sgn.default,
    aten.std.correction, aten.std_mean.correction,
)  # fmt: skip
"""Operators that keep the first operand and the first result."""

POOLS = (
    aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default,
    aten.cummax.default, aten.cummin.default,
    aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
)  # fmt: skip
"""Operators that keep the operand, and the positions in it of the results."""

SAVED: dict[Any, Row] = {
    **dict.fromkeys((*VIEWS, *MOVES, *LINEAR), NOTHING),
    **dict.fromkeys(CHOOSING, fixed(SECOND)),
    **dict.fromkeys(WITH_RESULT, fixed(0, OUT)),
    **dict.fromkeys(POOLS, fixed(0, SECOND)),
    **dict.fromkeys((aten.addcmul.default, aten.addmv.default, aten.addr.default), added_product),
    **dict.fromkeys((aten.fmod.Tensor, aten.remainder.Tensor), last_result(0, 1)),
    **dict.fromkeys(
        (
            aten.hinge_embedding_loss.default,
            aten.l1_loss.default,
            aten.margin_ranking_loss.default,
            aten.triplet_margin_loss.default,
        ),
        NOTHING,
    ),
    **dict.fromkeys(
        (
            aten.det.default,
            aten.linalg_det.default,
            aten.linalg_slogdet.default,
            aten.linalg_solve.default,
            aten.slogdet.default,
        ),
        fixed(0, OUT),
    ),
    **dict.fromkeys(
        (
            aten.inverse.default,
            aten.linalg_cholesky_ex.default,
            aten.linalg_eigvalsh.default,
            aten.linalg_inv.default,
            aten.linalg_inv_ex.default,
            aten.linalg_svdvals.default,
        ),
        RESULT,
    ),
    **dict.fromkeys((aten.linalg_eigh.default, aten.linalg_qr.default), fixed(OUT, SECOND)),
    **dict.fromkeys(
        (
            aten.linalg_pinv.atol_rtol_float,
            aten.linalg_pinv.atol_rtol_tensor,
            aten.linalg_pinv.default,
            aten.linalg_pinv.rcond_tensor,
            aten.pinverse.default,
        ),
        fixed(0, OUT),
    ),
    **dict.fromkeys(
        (aten.linalg_matrix_exp.default, aten.logdet.default, aten.matrix_exp.default, aten.nanmean.default), OPERAND
    ),
    **dict.fromkeys((aten.rnn_relu_cell.default, aten.rnn_tanh_cell.default), lambda grads: (*cell(1)(grads), OUT)),
    **dict.fromkeys((aten.linalg_lu_factor.default, aten.linalg_lu_factor_ex.default), fixed(OUT, SECOND)),
    **dict.fromkeys(
        (aten.linalg_householder_product.default, aten.linalg_lu_solve.default, aten.segment_reduce.default),
        fixed(0, 1, OUT),
    ),
    **dict.fromkeys((aten.index_reduce.default, aten.scatter_reduce.two), fixed(0, 1, 2, OUT)),
    **dict.fromkeys((aten.max_unpool2d.default, aten.max_unpool3d.default), fixed(1)),
    aten.frexp.Tensor: fixed(SECOND),
    aten.gru_cell.default: cell(1),
    aten.linalg_eigvals.default: RESULT,
    aten.linalg_lu.default: fixed(OUT, SECOND, THIRD),
    aten.lstm_cell.default: cell(2),
    aten.ormqr.default: fixed(0, 1, 2, OUT),
    aten.repeat_interleave.self_Tensor: NOTHING,
    **dict.fromkeys((aten.nanquantile.scalar, aten.quantile.scalar), NOTHING),
    aten.istft.default: index_operands,
    aten.linalg_cross.default: crosswise,
    aten.linalg_svd.default: fixed(OUT, SECOND, THIRD),
    aten.stft.default: lambda grads: (len(grads) - 1,),  # the window, or the signal that frames look at
    aten.addcdiv.default: lambda grads: (1, 2) if grads[2] else (2,),
    aten.cosine_similarity.default: graded,
    aten.div.Tensor_mode: quotient,
    aten.kl_div.default: lambda grads: (0, 1) if grads[1] else (1,),
    aten.lerp.Tensor: lambda grads: (0, 1, 2) if grads[2] else (2,),
    aten.linalg_cholesky.default: RESULT,
    aten.pairwise_distance.default: RESULT,
    aten.poisson_nll_loss.default: fixed(1),
    **dict.fromkeys((aten.cdist.default, aten.float_power.Tensor_Tensor, aten.pow.Tensor_Tensor), fixed(0, 1, OUT)),
    **dict.fromkeys(
        (
            aten.conv1d.padding,
            aten.conv2d.padding,
            aten.conv3d.default,
            aten.conv3d.padding,
            aten.conv_transpose1d.default,
            aten.conv_transpose2d.input,
            aten.conv_transpose3d.input,
        ),
        fixed(0, 1),
    ),
    **dict.fromkeys(
        (
            aten.exp2.default,
            aten.expm1.default,
            aten.tan.default,
        ),
        RESULT,
    ),
    aten.abs.default: OPERAND,
    aten.add.Tensor: NOTHING,
    aten.aminmax.default: fixed(0, OUT, SECOND),
    aten.avg_pool2d.default: OPERAND,
    aten.binary_cross_entropy_with_logits.default: every,
    aten.bmm.default: crosswise,
    aten.cat.default: NOTHING,
    aten.cholesky.default: RESULT,
    aten.cholesky_inverse.default: fixed(0, OUT),
    aten.cholesky_solve.default: fixed(0, 1, OUT),
    aten.clamp.default: OPERAND,
    aten.conv1d.default: fixed(0, 1),
    aten.conv2d.default: fixed(0, 1),
    aten.cos.default: OPERAND,
    aten.cosine_embedding_loss.default: fixed(0, 1),
    aten.cross_entropy_loss.default: index_operands,
    aten.cumsum.default: NOTHING,
    aten.div.Tensor: quotient,
    aten.dot.default: crosswise,
    aten.dropout.default: NOTHING,
    aten.einsum.default: crosswise,
    aten.elu.default: OPERAND,
    aten.embedding.default: fixed(1),
    aten.embedding_bag.padding_idx: bags,
    aten.erf.default: OPERAND,
    aten.exp.default: RESULT,
    **dict.fromkeys(
        (
            aten.fft_fft.default,
            aten.fft_ifft.default,
            aten.fft_rfft.default,
            aten.fft_rfft2.default,
            aten.fft_rfftn.default,
        ),
        OPERAND,
    ),
    aten.gather.default: fixed(0, 1),
    aten.gelu.default: OPERAND,
    aten.gru.input: recurrent(1),
    aten.hardswish.default: OPERAND,
    aten.hardtanh.default: OPERAND,
    aten.index.Tensor: index_operands,
    aten.hypot.default: lambda grads: (*graded(grads), OUT),
    aten.index_add.default: last_result(1, 2),
    aten.index_copy.default: lambda grads: (1, 2) if grads[2] else (1,),
    aten.index_fill.int_Scalar: fixed(1),
    aten.index_put.default: put,
    aten.index_select.default: fixed(1),
    aten.layer_norm.default: fixed(0, 1, 2),
    aten.ldexp.Tensor: lambda grads: (1, OUT) if grads[0] else (OUT,),
    aten.leaky_relu.default: OPERAND,
    aten.linalg_solve_triangular.default: fixed(0, OUT),
    aten.linear.default: crosswise,
    ops.affine: crosswise,
    aten.log.default: OPERAND,
    aten.log_softmax.int: RESULT,
    aten.lstm.input: recurrent(2),
    aten.masked_fill.Scalar: fixed(1),
    aten.masked_fill.Tensor: fixed(1),
    aten.masked_scatter.default: fixed(1),
    aten.matmul.default: crosswise,
    aten.max_pool2d.default: OPERAND,
    aten.mse_loss.default: fixed(0, 1),
    aten.mul.Tensor: crosswise,
    aten.mv.default: crosswise,
    aten.neg.default: NOTHING,
    aten.outer.default: crosswise,
    # of zeros or circular; `spellings` gives what reflects or replicates its own operator, which keeps its operand
    aten.pad.default: NOTHING,
    aten.pow.Tensor_Scalar: OPERAND,
    aten.reciprocal.default: RESULT,
    aten.relu.default: RESULT,
    aten.rms_norm.default: fixed(0),
    aten.rnn_relu.input: recurrent(1),
    aten.rnn_tanh.input: recurrent(1),
    aten.rsqrt.default: RESULT,
    aten.rsub.Scalar: NOTHING,
    aten.scaled_dot_product_attention.default: attention,
    aten.sigmoid.default: RESULT,
    aten.scatter.src: fixed(1),
    aten.scatter.value: fixed(1),
    aten.scatter_add.default: last_result(1),
    aten.silu.default: OPERAND,
    aten.sin.default: OPERAND,
    aten.softmax.int: RESULT,
    aten.softplus.default: OPERAND,
    aten.sqrt.default: RESULT,
    aten.sub.Tensor: NOTHING,
    aten.sum.default: NOTHING,
    aten.sum.dim_IntList: NOTHING,
    aten.tanh.default: RESULT,
    aten.to.dtype: NOTHING,
    aten.vdot.default: crosswise,
    aten.where.ScalarOther: fixed(0),
    aten.where.ScalarSelf: fixed(0),
    aten.where.self: fixed(0),
    ops.bag: bags,
    ops.ragged_bags: bags,
    # The log-softmax that is kept has the size and the layout of the logits, which it stands for here.
    ops.cross_entropy_each: every,
    ops.cross_entropy_sum: every,
    ops.ctc_each: fixed(0, 1, 2, 3, OUT),
    # the first layer for the gradient of tokens; and what autopar.rules.experts says
    ops.experts: lambda grads: (3, 4) if grads[0] else (4,),
    ops.fill_rows: fixed(1),
    ops.grouped_matmul: crosswise,
    ops.noised: fixed(1),
    ops.statistic: NOTHING,
}


def saved_positions(target: Any, grads: Sequence[bool]) -> tuple[int, ...]:
    """Positions kept by an op whose tensor operands want gradients as `grads` says; all operands when it has no row."""
    if not any(grads):
        return ()
    row = SAVED.get(target)
    positions = row(grads) if row else tuple(range(len(grads)))
    return tuple(
        len(grads) - 1 - position if position < 0 else position for position in positions if position < len(grads)
    )
