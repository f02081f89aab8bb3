"""Temporary memory of operators: bytes that are allocated and freed while an operator runs, one row each, as formulas
in the sizes of its tensors (`local.taken`). Read by memory.operators.

Most are results of the plain operators that a composite operator or a derivative consists of (torch's derivatives.yaml,
FunctionsManual.cpp, Loss.cpp), on all devices. `CPU` has what only CPU kernels allocate. The tests measure every
operator that has a rule on its samples, so that one without a row shows.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.memory import matrices
from autopar.memory.local import Bytes, Local, nothing, rows, taken
from autopar.problem.graph import Op
from autopar.problem.traffic import SOFTMAXES, casts_first
from autopar.rules import pointwise
from autopar.rules.arguments import given, named
from passes import ops
from passes.tables import MEAN, NONE

aten = torch.ops.aten


FIRST = frozenset(
    named("""add.Scalar add.Tensor addcdiv.default addcmul.default addmv.default
    fmod.Scalar fmod.Tensor frac.default
    index_add.default remainder.Scalar remainder.Tensor scatter_add.default sgn.default
    sub.Scalar sub.Tensor""")
)
"""Operators that hand the gradient of their result on to the first operand without a copy, or make none."""


def same(op: Op, operand: int) -> bool:
    """Whether the gradient of an operand is the gradient of the result itself, except for a sum where the operand is
    broadcast."""
    if operand == 1:
        return op.target in (aten.add.Tensor, aten.rsub.Tensor) and op.call.kwargs.get("alpha", 1) == 1
    return op.target in FIRST or (op.target is aten.index_put.default and bool(given(op.call)["accumulate"]))


def reduced(local: Local) -> float:
    """Bytes of the gradients of all broadcast operands, each made at the size of the result before it is summed."""
    if local.op.target not in pointwise.RULES or not local.outs:
        return 0.0
    elements = local.out / local.op.call.outs[0].itemsize
    made = [
        each.grad and nbytes / each.itemsize < elements and not same(local.op, i)
        for i, (nbytes, each) in enumerate(zip(local.ins, local.op.call.ins, strict=True))
    ]
    return sum(made) * local.out


def _for(operand: int, formula: str, otherwise: str = "") -> Bytes:
    """`formula` where operand number `operand` has a gradient, else `otherwise`."""
    first, second = taken(formula), taken(otherwise)
    return lambda local: first(local) if local.grad(operand) else second(local)


def _left(count: int) -> Bytes:
    """`count` tensors of the size of the largest, less those that become gradients of operands."""
    return lambda local: max(0, count - local.grads) * taken("w")(local)


def _quotient(local: Local) -> float:
    """-gradient * ((x / y) / y) at full size, where y has a gradient: two tensors, or three where x is a number."""
    if isinstance(local.op.call.args[0], (int, float)):
        return 3 * local.out
    return 2 * local.out if local.grad(1) else 0.0


def _smooths(local: Local) -> bool:
    """Whether a loss has weights of classes together with label smoothing."""
    return len(local.ins) > 2 and local.op.call.args[3] > 0


def _complex(local: Local, times: float = 1.0) -> float:
    """The result of complex numbers, before its real part is taken."""
    return times * local.ins[0] if local.op.call.ins[0].itemsize > local.op.call.outs[0].itemsize else 0.0


def _conjugated(local: Local) -> float:
    """The conjugate of a complex factor."""
    return local.out if local.op.out_dtypes and local.op.out_dtypes[0].is_complex else 0.0


def _widened(local: Local) -> float:
    """The operand of a softmax, or its gradient, in the dtype of the result."""
    return local.out if casts_first(local.op, "cpu" if local.on_cpu else "") else 0.0


def _of_groups(local: Local) -> float:
    """Gradients of the rows, or of the weights, of each group when these are joined; that of the result has gone by
    then."""
    return max(0.0, max(local.ins[i] * local.grad(i) for i in range(2)) - local.out)


def _of_experts(local: Local) -> float:
    """Gradients of rows, or in the end, when nothing of what was kept is left, those of the first layer of each expert
    before they are joined."""
    return max(0.5 * local.extra, local.ins[ops.UP] * local.grad(ops.UP) - local.extra)


def _bounded(local: Local) -> float:
    """A mask for each bound."""
    return taken("m")(local) * sum(bound is not None for bound in (local.given("min"), local.given("max")))


def _joined(local: Local) -> float:
    """Bytes of the larger of two operands after each is broadcast to the common size."""
    (x, a), (y, b) = ((nbytes, each.sizes) for nbytes, each in zip(local.ins, local.op.call.ins, strict=True))
    rank = max(len(a), len(b))
    wide = math.prod(
        max(sizes) for sizes in zip(*((1,) * (rank - len(each)) + tuple(each) for each in (a, b)), strict=True)
    )
    return max(x * wide / math.prod(a), y * wide / math.prod(b))


def _smaller(local: Local) -> float:
    """A gradient at full size where an operand that has one is broadcast."""
    return (
        taken("w")(local)
        if any(each.grad and nbytes < local.whole[0] for nbytes, each in zip(local.ins, local.op.call.ins, strict=True))
        else 0.0
    )


def _similarity_back(local: Local) -> float:
    """Four products at the common size, less those that become gradients; and gradients before they are summed over
    broadcast dims."""
    wide = _joined(local)
    return (4 - local.grads) * wide + sum(
        wide - nbytes for nbytes, each in zip(local.ins, local.op.call.ins, strict=True) if each.grad
    )


def _transform(plain: str, sized: str) -> Bytes:
    """A Fourier transform: `sized` where it pads or trims to given sizes, else `plain`."""
    return lambda local: taken(plain if local.given("s") is None else sized)(local)


def _along(last: str, other: str) -> Bytes:
    """`last` where the dim of the operator is the last one, else `other`."""
    return lambda local: taken(last if local.given("dim") in (-1, len(local.op.call.ins[0].shape) - 1) else other)(
        local
    )


def _masked(local: Local) -> float:
    """Indices of the elements that a mask selects: an int64 per element and dim of the mask."""
    dims = sum(len(each.shape) for each in local.op.call.ins[1:] if each.itemsize == 1)
    return 8 * dims * local.out / local.op.call.outs[0].itemsize


def _put_back(local: Local) -> float:
    """The gradient of a broadcast source before it is summed; twice that with a mask."""
    *_, chosen, put = local.op.call.ins
    wide = put.grad and (1 in put.sizes or not put.sizes)
    return taken("w")(local) * wide * (2 if chosen.itemsize == 1 else 1)


def _turns(local: Local) -> float:
    """A copy, where several dims are turned, which is done one after the other."""
    return local.out if len(local.given("shifts")) > 1 else 0.0


def _circular(local: Local) -> float:
    """A copy of the result, for circular padding."""
    return local.out if local.given("mode") == "circular" else 0.0


def _of_channels(local: Local) -> float:
    """Two sums per channel and sample."""
    return 2 * local.out / math.prod(local.op.call.outs[0].sizes[2:])


def _truths(local: Local) -> float:
    """A mask of the elements that are not 0, unless they are bool already."""
    return taken("m")(local) if local.op.call.ins[0].itemsize > 1 else 0.0


def _counts(local: Local) -> float:
    """For a mean the number of sources per index: ones that are summed, then a mask of the zeros."""
    return (
        local.ins[0] + max(local.ins[2], local.ins[0] / local.op.call.ins[0].itemsize)
        if local.given("reduce") == "mean"
        else 0.0
    )


SPREAD = {"mean": (2, 3, 0), "amax": (4, 4, 0), "amin": (4, 4, 0), "prod": (6, 7, 2)}
"""Reduction -> the number of tensors of the operand's size, of the source's size, and of masks of the source in
index_reduce_backward, both gradients included."""


def _spread_back(local: Local) -> float:
    """Bytes of the tensors of `SPREAD`, less the gradients that are wanted."""
    wide, sources, masks = SPREAD[local.given("reduce")]
    source = local.ins[2]
    return (wide - local.grad(0)) * local.ins[0] + (
        sources - local.grad(2) + masks / local.op.call.ins[2].itemsize
    ) * source


def _terms(each: float, summed: float) -> Bytes:
    """A loss that sums terms: `each` tensors without a reduction, `summed` with one. Some losses sum into the memory of
    the terms, so that the scalar keeps it alive."""
    return lambda local: (each if local.given("reduction") == NONE else summed) * taken("w")(local)


def _divergence(local: Local) -> float:
    """The terms from what is kept, where the targets are logarithms."""
    return _terms(2, 3)(local) - local.grads * (taken("w")(local) if local.given("log_target") else 0.0)


def _divergence_back(local: Local) -> float:
    """Of targets with a gradient: a product, the logarithm, and masks of zeros."""
    if local.given("log_target"):
        return 0.0
    return taken("2w+3m")(local) if local.grad(1) else _terms(0, 1)(local)


def _paths(local: Local) -> float:
    """Per sample and time step, a number for each target and each blank around them (2 targets + 1)."""
    scores, targets = local.op.call.ins[:2]
    return local.ins[0] / scores.sizes[2] * (2 * targets.sizes[1] + 1)


def _poisson(local: Local) -> float:
    """The terms; of numbers that are not logarithms with their logarithms; Stirling's formula in eight."""
    kept = 0 if local.given("log_input") else 2 - local.grads
    return _terms(1 + kept, 2 + kept)(local) + taken("4w")(local) * bool(local.given("full"))


def _of_mean(rest: Bytes) -> Bytes:
    """`rest`, and for a mean its gradient at full size."""
    return lambda local: rest(local) + (taken("w")(local) if local.given("reduction") == MEAN else 0.0)


FORWARD: dict[Any, Bytes] = {
    **rows(
        {
            "w": "isinf native_dropout normal.Tensor_float median histc",
            "w+m": "count_nonzero.dim_IntList",
            "w+2m": "isfinite",
            "2w+3m": "isclose",
            "w+8m": "kthvalue",
            "w+o": "logsumexp",
            "a": "argsort argsort.stable",
            "b": "cholesky_solve",
        }
    ),
    **dict.fromkeys(named("all.default all.dim all.dims any.default any.dim any.dims"), _truths),
    **dict.fromkeys((aten.median.dim, aten.nanmedian.dim), _along("", "w")),
    **dict.fromkeys(
        named("fft_fft2.default fft_fftn.default fft_ifft2.default fft_ifftn.default"), _transform("o", "2o")
    ),
    **dict.fromkeys(named("fft_irfft2.default fft_irfftn.default"), _transform("2a", "a")),
    aten.fft_irfft.default: _along("", "2.5a"),
    aten.fft_hfft.default: _along("a", "3.5a"),
    aten.fft_rfft.default: _along("", "a"),
    **matrices.FORWARD,
    **dict.fromkeys(SOFTMAXES, _widened),
    aten.index.Tensor: _masked,
    aten.index_reduce.default: _counts,
    aten.roll.default: _turns,
    aten.abs.default: _complex,
    aten.cosine_similarity.default: lambda local: (3 - local.grads) * _joined(local),
    aten.binary_cross_entropy.default: _terms(0, 1),
    aten.binary_cross_entropy_with_logits.default: _terms(1, 2),
    aten.cosine_embedding_loss.default: taken("w"),
    # of shares of classes
    aten.cross_entropy_loss.default: lambda local: taken("w")(local) * local.op.call.ins[1].floating,
    **dict.fromkeys((ops.cross_entropy_each, ops.cross_entropy_sum), lambda local: taken("a")(local) * _smooths(local)),
    # labels, which are left out, and weights
    ops.weigh_valid: lambda local: (
        local.ins[0] + local.ins[0] / local.op.call.ins[0].itemsize * (1 + local.op.call.ins[1].itemsize)
    ),
    aten.hinge_embedding_loss.default: _terms(4, 5),
    aten.huber_loss.default: _terms(0, 1),
    aten.kl_div.default: _divergence,
    aten.l1_loss.default: _terms(0, 1),
    aten.margin_ranking_loss.default: _terms(1, 2),
    aten.mse_loss.default: _terms(0, 2),
    aten.pairwise_distance.default: taken("w"),
    aten.poisson_nll_loss.default: _poisson,
    aten.smooth_l1_loss.default: _terms(0, 2),
    aten.soft_margin_loss.default: _terms(0, 1),
    aten.triplet_margin_loss.default: taken("w"),
    ops.count_each: taken("5w"),
    ops.count_valid: taken("a"),
    ops.experts: lambda local: 0.5 * local.extra,  # results put in order and weighted
    ops.grouped_matmul: taken("o"),  # a product for each group
    ops.noised: lambda local: 0.0 if local.grad(1) else local.out,
    ops.picked_places: lambda local: 16 * local.ins[0],  # as int32, sorted, and all places
}
"""Bytes beside operands, results and what is kept, while the forward runs."""

BACKWARD: dict[Any, Bytes] = {
    **rows(
        {
            "0.5w": "repeat",
            "m": "clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor clamp.Tensor",
            "2m": "fmax fmin",
            "w": """copysign.Scalar copysign.Tensor cosh digamma div.Tensor_mode exp2 expm1
            hypot instance_norm lerp.Tensor lgamma linalg_vector_norm
                log10 log1p log2 native_dropout norm.Scalar norm.ScalarOpt_dim pow.Scalar prelu prod sin sinh
                sqrt xlogy.Scalar_Self""",
            "w+m": "nan_to_num",
            "w+2m": "maximum minimum nansum",
            "w+3m": "special_xlog1py xlogy.Tensor",
            "1.5b": "ldexp.Tensor",
            "1.5w": "float_power.Scalar",
            "w+2o": "var.correction",
            "w+3o": "prod.dim_int std.correction",
            "w+m+3o": "amax amin",
            "2w": """atan cholesky_inverse cos cumsum logsumexp pow.Tensor_Scalar reciprocal rsqrt
            special_xlog1py.self_scalar square std_mean.correction tan var_mean.correction""",
            "2w+m": "max median min",
            "2w+m+3o": "aminmax",
            "2.5w": "float_power.Tensor_Scalar",
            "3w": "acosh asinh atanh cholesky linalg_cholesky logaddexp logaddexp2 special_entr",
            "3w+m": "cumprod",
            "4w": "asin erf erfc erfinv",
            "4w+m": "pow.Tensor_Tensor",
            "5w": "acos float_power.Tensor_Tensor",
            "7w": "logcumsumexp sinc",
            "a": "fft_fft fft_fft2 fft_fftn fft_ifft2 fft_ifftn",
            "a+o": "fft_ifft",
            "3a": "fft_ihfft fft_rfft2 fft_rfftn",
            "4b": "embedding_bag.padding_idx",
        }
    ),
    aten.div.Tensor: _quotient,
    **dict.fromkeys(
        (aten.fmod.Tensor, aten.remainder.Tensor, aten.masked_scatter.default),
        lambda local: _for(len(local.ins) - 1, "w")(local),
    ),
    **dict.fromkeys(
        (aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default), _for(1, "", "b")
    ),
    **dict.fromkeys((ops.bag, ops.ragged_bags), taken("4b")),
    aten.abs.default: lambda local: _complex(local, 2.0) or taken("w")(local),
    aten.addcdiv.default: lambda local: 4 * local.out * (local.grad(1) or local.grad(2)),
    aten.addcmul.default: lambda local: local.out * (local.grad(1) or local.grad(2)),
    aten.atan2.default: _for(1, "5w", "3w"),
    aten.cdist.default: _for(1, "2w"),
    aten.cholesky_solve.default: _for(1, "2b", "b"),
    aten.clamp.default: _bounded,
    aten.group_norm.default: _of_channels,
    **dict.fromkeys(named("fft_irfft.default fft_hfft.default"), _along("", "1.2o")),
    aten.fft_rfft.default: _along("3a", "5a"),
    **matrices.BACKWARD,
    **dict.fromkeys(SOFTMAXES, _widened),
    aten.index.Tensor: _masked,
    aten.index_add.default: lambda local: local.ins[2] * (local.grad(2) and local.given("alpha") != 1),
    aten.index_put.default: _put_back,
    aten.index_reduce.default: _spread_back,
    aten.linalg_cross.default: _smaller,
    aten.linalg_solve_triangular.default: _for(1, "a", "a+o"),
    aten.masked_fill.Tensor: _for(2, "4w"),
    aten.mul.Tensor: _conjugated,
    aten.outer.default: _for(1, "2w", "w"),
    aten.pad.default: _circular,
    aten.roll.default: _turns,
    aten.scatter_reduce.two: lambda local: taken("" if local.given("reduce") == "sum" else "5w")(local),
    aten.binary_cross_entropy_with_logits.default: lambda local: (
        taken("w")(local) * (len(local.ins) > 2 or local.grad(1)) * max(1, len(local.ins) - 1)
    ),
    aten.cosine_embedding_loss.default: lambda local: local.grads * taken("w")(local),
    aten.cosine_similarity.default: _similarity_back,
    aten.cross_entropy_loss.default: taken("w"),
    aten.hinge_embedding_loss.default: taken("w+3m"),
    aten.kl_div.default: _divergence_back,
    aten.l1_loss.default: _of_mean(_left(2)),
    aten.margin_ranking_loss.default: _of_mean(nothing),
    aten.mse_loss.default: _smaller,
    aten.pairwise_distance.default: _left(2),
    aten.poisson_nll_loss.default: _of_mean(taken("w")),
    aten.soft_margin_loss.default: taken("2w"),
    aten.triplet_margin_loss.default: _left(2),
    ops.ctc_each: _paths,
    ops.cross_entropy_each: taken("a"),  # gradient of the log-softmax, then that of the logits
    ops.cross_entropy_sum: taken("a"),
    ops.experts: _of_experts,
    ops.fill_rows: _for(2, "4w"),
    ops.grouped_matmul: _of_groups,
}
"""Bytes beside gradients of operands and results, while the backward runs."""
