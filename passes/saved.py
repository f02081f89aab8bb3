"""Which tensors autograd keeps from forward to backward, one table entry per operator.

A row gives positions among (tensor operands..., results...): `OUT` is the first result, `SECOND` the next, `THIRD` the one behind it. Taken
from torch's derivatives.yaml and checked against `saved_tensors_hooks` in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes import ops
from passes.tables import VIEWS

aten = torch.ops.aten

OUT, SECOND, THIRD = -1, -2, -3
Row = Callable[[Sequence[bool]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward of one call keeps: tensors by their positions among operands and results, `copies` of operands (where
    the kernel reorders or scales them first), and `extra_bytes` of neither: masks, statistics, indices."""

    positions: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    extra_bytes: Any = 0  # int or sympy expression


def _fixed(*positions: int) -> Row:
    return lambda grads: positions


def _crosswise(grads: Sequence[bool]) -> tuple[int, ...]:
    """Of a product: for each factor that requires a gradient, the other factor."""
    if len(grads) < 2:
        return ()
    return tuple(position for position, other in ((0, 1), (1, 0)) if grads[other])


def _quotient(grads: Sequence[bool]) -> tuple[int, ...]:
    """x / y: y for the gradient of x, both for the gradient of y."""
    if len(grads) < 2:
        return ()
    return (0, 1) if grads[1] else (1,)


def _added(grads: Sequence[bool]) -> tuple[int, ...]:
    """Of a product that is added to the first operand: for each factor that requires a gradient, the other factor."""
    return tuple(position + 1 for position in _crosswise(grads[1:]))


def _graded(grads: Sequence[bool]) -> tuple[int, ...]:
    """The operands that require a gradient."""
    return tuple(position for position, grad in enumerate(grads) if grad)


def _last(*positions: int) -> Row:
    """The operands that the gradient of the last operand needs."""
    return lambda grads: positions if grads[-1] else ()


def _indices(grads: Sequence[bool]) -> tuple[int, ...]:
    """All operands but the first."""
    return tuple(range(1, len(grads)))


def _put(grads: Sequence[bool]) -> tuple[int, ...]:
    """The indices: the operands between the tensor that is written to and the values."""
    return tuple(range(1, len(grads) - 1))


def _attention(grads: Sequence[bool]) -> tuple[int, ...]:
    """Queries, keys, values, the mask if there is one, and the result."""
    return (*range(len(grads)), OUT)


def _bags(grads: Sequence[bool]) -> tuple[int, ...]:
    """All operands but the table, which is kept only for the gradient of per-sample weights."""
    return (0, *_indices(grads)) if any(grads[1:]) else _indices(grads)


def _recurrent(states: int) -> Row:
    """The input, the states and, of one layer, both weights; the first of them, which the input is multiplied with, for the gradient of the
    input."""
    return lambda grads: (*range(1 + states), *([1 + states] if grads[0] else []), *range(2 + states, len(grads)))


def _cell(states: int) -> Row:
    """Of both products, for each factor that wants a gradient, the other one; the second state, which a gate multiplies."""
    along = 2 + states

    def kept(grads: Sequence[bool]) -> tuple[int, ...]:
        factors = ((0, along - 1), (1, along))
        others = [position for one, other in factors for position, wants in ((one, other), (other, one)) if grads[wants]]
        return (*others, *range(2, 1 + states))

    return kept


NOTHING, RESULT, OPERAND = _fixed(), _fixed(OUT), _fixed(0)

MOVES = (
    aten.channel_shuffle.default, aten.constant_pad_nd.default, aten.diff.default, aten.fft_fft2.default, aten.fft_fftn.default,
    aten.fft_ifft2.default, aten.fft_ifftn.default, aten.fft_irfft.default, aten.fft_irfft2.default, aten.fft_irfftn.default, aten.flip.default, aten.movedim.intlist,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.repeat.default, aten.roll.default,
    aten.select_scatter.default, aten.slice_scatter.default, aten.stack.default, aten.tril.default, aten.triu.default,
    aten.view_as_real.default, ops.as_complex,
)  # fmt: skip
"""Ops that copy elements to other places, change their signs, or add them up with factors that they know: Fourier transforms."""

LINEAR = tuple(getattr(getattr(aten, name), overload) for name, overloads in {
    "_to_copy": "default", "_upsample_bicubic2d_aa": "vec", "_upsample_bilinear2d_aa": "vec", "add": "Scalar", "ceil": "default", "clone": "default", "col2im": "default",
    "contiguous": "default", "deg2rad": "default", "div": "Scalar Scalar_mode", "fft_fftshift": "default", "fft_ifftshift": "default", "flatten": "using_ints", "floor": "default",
    "fmod": "Scalar", "frac": "default", "im2col": "default", "lerp": "Scalar", "lift_fresh_copy": "default", "mean": "default dim", "mul": "Scalar", "rad2deg": "default",
    "remainder": "Scalar", "round": "default decimals", "rsub": "Tensor", "sign": "default", "sub": "Scalar", "to": "dtype_layout", "trapezoid": "dx", "true_divide": "Scalar",
    "trunc": "default", "upsample_bicubic2d": "default vec", "upsample_bilinear2d": "default vec", "upsample_linear1d": "default vec", "upsample_nearest1d": "default vec",
    "upsample_nearest2d": "default vec", "upsample_nearest3d": "vec", "upsample_trilinear3d": "vec",
}.items() for overload in overloads.split())
"""Ops whose gradient needs sizes and numbers alone."""

CHOOSING = (
    aten.kthvalue.default, aten.max.dim, aten.median.dim, aten.min.dim, aten.mode.default, aten.nanmedian.dim, aten.native_dropout.default, aten.sort.default,
    aten.sort.stable, aten.topk.default,
)  # fmt: skip
"""Ops that keep which elements they chose."""

WITH_RESULT = (
    aten.amax.default, aten.amin.default, aten.copysign.Scalar, aten.copysign.Tensor, aten.cumprod.default, aten.float_power.Scalar, aten.frobenius_norm.dim,
    aten.linalg_vector_norm.default, aten.logcumsumexp.default, aten.logsumexp.default, aten.max.default, aten.median.default, aten.min.default, aten.norm.Scalar,
    aten.norm.ScalarOpt_dim, aten.pow.Scalar, aten.prod.default, aten.prod.dim_int, aten.sgn.default, aten.special_logsumexp.default, aten.std.correction,
    aten.std.default, aten.std.dim, aten.std_mean.correction, aten.std_mean.dim,
)  # fmt: skip
"""Ops that keep the first operand, and the first result."""

POOLS = (
    aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, aten.cummax.default, aten.cummin.default,
    aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
)  # fmt: skip
"""Ops that keep the operand, and where in it they found the result."""

SAVED: dict[Any, Row] = {
    **dict.fromkeys((*VIEWS, *MOVES, *LINEAR), NOTHING),
    **dict.fromkeys(CHOOSING, _fixed(SECOND)),
    **dict.fromkeys(WITH_RESULT, _fixed(0, OUT)),
    **dict.fromkeys(POOLS, _fixed(0, SECOND)),
    **dict.fromkeys((aten.addcmul.default, aten.addmm.default, aten.addmv.default, aten.baddbmm.default), _added),
    **dict.fromkeys((aten.fmod.Tensor, aten.remainder.Tensor), _last(0, 1)),
    **dict.fromkeys((aten.hinge_embedding_loss.default, aten.l1_loss.default, aten.margin_ranking_loss.default, aten.triplet_margin_loss.default), NOTHING),
    **dict.fromkeys((aten.det.default, aten.linalg_det.default, aten.linalg_slogdet.default, aten.linalg_solve.default, aten.slogdet.default), _fixed(0, OUT)),
    **dict.fromkeys((aten.inverse.default, aten.linalg_cholesky_ex.default, aten.linalg_eigvalsh.default, aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.linalg_svdvals.default),
                    RESULT),
    **dict.fromkeys((aten.linalg_eigh.default, aten.linalg_qr.default), _fixed(OUT, SECOND)),
    **dict.fromkeys((aten.linalg_pinv.atol_rtol_float, aten.linalg_pinv.atol_rtol_tensor, aten.linalg_pinv.default, aten.pinverse.default), _fixed(0, OUT)),
    **dict.fromkeys((aten.linalg_matrix_exp.default, aten.logdet.default, aten.matrix_exp.default, aten.nanmean.default), OPERAND),
    **dict.fromkeys((aten.rnn_relu_cell.default, aten.rnn_tanh_cell.default), lambda grads: (*_cell(1)(grads), OUT)),
    **dict.fromkeys((aten.linalg_lu_factor.default, aten.linalg_lu_factor_ex.default), _fixed(OUT, SECOND)),
    **dict.fromkeys((aten.linalg_householder_product.default, aten.linalg_lu_solve.default, aten.segment_reduce.default), _fixed(0, 1, OUT)),
    **dict.fromkeys((aten.index_reduce.default, aten.scatter_reduce.two), _fixed(0, 1, 2, OUT)),
    **dict.fromkeys((aten.max_unpool2d.default, aten.max_unpool3d.default), _fixed(1)),
    aten.frexp.Tensor: _fixed(SECOND),
    aten.gru_cell.default: _cell(1),
    aten.linalg_eigvals.default: RESULT,
    aten.linalg_lu.default: _fixed(OUT, SECOND, THIRD),
    aten.lstm_cell.default: _cell(2),
    aten.ormqr.default: _fixed(0, 1, 2, OUT),
    aten.repeat_interleave.self_Tensor: NOTHING,
    **dict.fromkeys((aten.nanquantile.scalar, aten.quantile.scalar), NOTHING),
    aten.istft.default: _indices,
    aten.linalg_cross.default: _crosswise,
    aten.linalg_svd.default: _fixed(OUT, SECOND, THIRD),
    aten.stft.default: lambda grads: (len(grads) - 1,),  # the window, or the signal that frames look at
    aten.addcdiv.default: lambda grads: (1, 2) if grads[2] else (2,),
    aten.cosine_similarity.default: _graded,
    aten.div.Tensor_mode: _quotient,
    aten.kl_div.default: lambda grads: (0, 1) if grads[1] else (1,),
    aten.kron.default: _crosswise,
    aten.lerp.Tensor: lambda grads: (0, 1, 2) if grads[2] else (2,),
    aten.linalg_cholesky.default: RESULT,
    aten.pairwise_distance.default: RESULT,
    aten.poisson_nll_loss.default: _fixed(1),
    aten.true_divide.Tensor: _quotient,
    **dict.fromkeys((aten.cdist.default, aten.float_power.Tensor_Tensor, aten.pow.Tensor_Tensor), _fixed(0, 1, OUT)),
    **dict.fromkeys((aten.conv2d.padding, aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
                    _fixed(0, 1)),
    **dict.fromkeys((aten._log_softmax.default, aten._softmax.default, aten.exp2.default, aten.expm1.default, aten.special_expit.default, aten.tan.default), RESULT),
    aten.abs.default: OPERAND,
    aten.add.Tensor: NOTHING,
    aten.aminmax.default: _fixed(0, OUT, SECOND),
    aten.avg_pool2d.default: OPERAND,
    aten.binary_cross_entropy_with_logits.default: _fixed(0, 1),
    aten.bmm.default: _crosswise,
    aten.cat.default: NOTHING,
    aten.cholesky.default: RESULT,
    aten.cholesky_inverse.default: _fixed(0, OUT),
    aten.cholesky_solve.default: _fixed(0, 1, OUT),
    aten.clamp.default: OPERAND,
    aten.conv1d.default: _fixed(0, 1),
    aten.conv2d.default: _fixed(0, 1),
    aten.cos.default: OPERAND,
    aten.cumsum.default: NOTHING,
    aten.div.Tensor: _quotient,
    aten.dot.default: _crosswise,
    aten.dropout.default: NOTHING,
    aten.einsum.default: _crosswise,
    aten.elu.default: OPERAND,
    aten.embedding.default: _fixed(1),
    aten.embedding_bag.padding_idx: _bags,
    aten.erf.default: OPERAND,
    aten.exp.default: RESULT,
    **dict.fromkeys((aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_rfft2.default, aten.fft_rfftn.default), OPERAND),
    aten.gather.default: _fixed(0, 1),
    aten.gelu.default: OPERAND,
    aten.gru.input: _recurrent(1),
    aten.hardswish.default: OPERAND,
    aten.hardtanh.default: OPERAND,
    aten.index.Tensor: _indices,
    aten.hypot.default: lambda grads: (*_graded(grads), OUT),
    aten.index_add.default: _last(1, 2),
    aten.index_copy.default: lambda grads: (1, 2) if grads[2] else (1,),
    aten.index_fill.int_Scalar: _fixed(1),
    aten.index_put.default: _put,
    aten.index_select.default: _fixed(1),
    aten.layer_norm.default: _fixed(0, 1, 2),
    aten.leaky_relu.default: OPERAND,
    aten.linalg_solve_triangular.default: _fixed(0, OUT),
    aten.linear.default: _crosswise,
    ops.affine: _crosswise,
    aten.log.default: OPERAND,
    aten.log_softmax.int: RESULT,
    aten.lstm.input: _recurrent(2),
    aten.masked_fill.Scalar: _fixed(1),
    aten.masked_fill.Tensor: _fixed(1),
    aten.masked_scatter.default: _fixed(1),
    aten.matmul.default: _crosswise,
    aten.max_pool2d.default: OPERAND,
    aten.mm.default: _crosswise,
    aten.mse_loss.default: _fixed(0, 1),
    aten.mul.Tensor: _crosswise,
    aten.mv.default: _crosswise,
    aten.neg.default: NOTHING,
    aten.outer.default: _crosswise,
    aten.pad.default: NOTHING,  # of zeros or circular; `spellings` gives what reflects or replicates its own operator, which keeps its operand
    aten.pow.Tensor_Scalar: OPERAND,
    aten.reciprocal.default: RESULT,
    aten.relu.default: RESULT,
    aten.rms_norm.default: _fixed(0),
    aten.rnn_relu.input: _recurrent(1),
    aten.rnn_tanh.input: _recurrent(1),
    aten.rsqrt.default: RESULT,
    aten.rsub.Scalar: NOTHING,
    aten.scaled_dot_product_attention.default: _attention,
    aten.sigmoid.default: RESULT,
    aten.scatter.src: _fixed(1),
    aten.scatter.value: _fixed(1),
    aten.scatter_add.default: _last(1),
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
    aten.vdot.default: _crosswise,
    aten.where.ScalarOther: _fixed(0),
    aten.where.ScalarSelf: _fixed(0),
    aten.where.self: _fixed(0),
    ops.bag: _bags,
    ops.ragged_bags: _bags,
    # The log-softmax that is kept has the size and the layout of the logits, which it stands for here.
    ops.cross_entropy_each: _fixed(0, 1),
    ops.cross_entropy_sum: _fixed(0, 1),
    ops.ctc_each: _fixed(0, 1, 2, 3, OUT),
    # the first layer for the gradient of tokens; and what autopar.rules.experts says
    ops.experts: lambda grads: (3, 4) if grads[0] else (4,),
    ops.fill_rows: _fixed(1),
    ops.grouped_matmul: _crosswise,
    ops.noised: _fixed(1),
    ops.statistic: NOTHING,
}


def saved_positions(target: Any, grads: Sequence[bool]) -> tuple[int, ...]:
    """Positions kept by an op whose tensor operands want gradients as `grads` says; all operands when it has no row."""
    if not any(grads):
        return ()
    row = SAVED.get(target)
    positions = row(grads) if row else tuple(range(len(grads)))
    return tuple(len(grads) - 1 - position if position < 0 else position for position in positions if position < len(grads))
