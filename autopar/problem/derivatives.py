"""Bytes that derivatives of several kernels move, and operators that are several kernels: one table entry per operator,
from derivatives.yaml and FunctionsManual.cpp.

Checked against the kernels that torch runs in tests/unit/problem/test_derivatives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.problem.graph import Op
from autopar.rules.language import Tensor

aten = torch.ops.aten

PLACED = frozenset(
    (
        aten.embedding.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.kthvalue.default,
        aten.max.dim,
        aten.median.dim,
        aten.min.dim,
        aten.mode.default,
        aten.nanmedian.dim,
        aten.sort.default,
        aten.sort.stable,
        aten.topk.default,
    )
)
"""Operators whose gradient is zeros of the operand's size, to parts of which that of the result is added."""
HANDED_ON = frozenset((aten.cat.default, aten.stack.default, aten.sum.default, aten.sum.dim_IntList))
"""Operators whose derivative is a view of the gradient: parts of it, or the same number for all that was summed."""
SPREAD = frozenset((aten.sum.default, aten.sum.dim_IntList))
"""Those of HANDED_ON whose derivative has next to nothing in memory."""


@dataclass(frozen=True, slots=True)
class More:
    """How often kernels read or write what has the size of the first operand, and masks of as many elements."""

    passes: float = 0.0
    masks: int = 0

    def bytes(self, op: Op) -> float:
        """Bytes that they move."""
        return self.passes * tensor_bytes(op.call.ins[0]) + self.masks * math.prod(op.call.ins[0].sizes)


MORE = {
    aten.abs.default: More(2),
    aten.acos.default: More(11),
    aten.acosh.default: More(6),
    aten.amax.default: More(0, 3),
    aten.amin.default: More(0, 3),
    aten.asin.default: More(9),
    aten.asinh.default: More(6),
    aten.atan.default: More(4),
    aten.atanh.default: More(11),
    aten.binary_cross_entropy_with_logits.default: More(4),
    aten.clamp.default: More(1, 6),
    aten.clamp_max.default: More(0, 2),
    aten.clamp_min.default: More(0, 2),
    aten.cos.default: More(4),
    aten.cosh.default: More(2),
    aten.cumsum.default: More(4),
    aten.digamma.default: More(2),
    aten.erf.default: More(8),
    aten.erfc.default: More(8),
    aten.erfinv.default: More(8),
    aten.exp2.default: More(2),
    aten.expm1.default: More(2),
    aten.hinge_embedding_loss.default: More(8, 2),
    aten.kl_div.default: More(2),
    aten.l1_loss.default: More(2),
    aten.lgamma.default: More(2),
    aten.linalg_vector_norm.default: More(4),
    aten.log10.default: More(2),
    aten.log1p.default: More(2),
    aten.log2.default: More(2),
    aten.logcumsumexp.default: More(38),
    aten.logsumexp.default: More(4),
    aten.margin_ranking_loss.default: More(2, 2),
    aten.nan_to_num.default: More(4, 2),
    aten.poisson_nll_loss.default: More(6),
    aten.pow.Scalar: More(1),
    aten.pow.Tensor_Scalar: More(4),
    aten.prod.dim_int: More(15),
    aten.reciprocal.default: More(4),
    aten.rsub.Scalar: More(2),
    aten.rsqrt.default: More(4),
    aten.sin.default: More(2),
    aten.sinc.default: More(22, 2),
    aten.sinh.default: More(2),
    aten.special_entr.default: More(6),
    aten.sqrt.default: More(2),
    aten.square.default: More(4),
    aten.std.correction: More(3),
    aten.std_mean.correction: More(3),
    aten.tan.default: More(4),
    aten.triplet_margin_loss.default: More(13),
    aten.var.correction: More(3),
    aten.var_mean.correction: More(3),
}
"""Operators whose derivative by their first operand is several kernels: what these move beyond one that reads the
gradient and what is kept, and writes a gradient."""

MORE_FORWARD = {
    # two norms, two quotients, a product and a sum
    aten.cosine_similarity.default: More(8),
    aten.cosine_embedding_loss.default: More(8),
    aten.hinge_embedding_loss.default: More(24),
    aten.kl_div.default: More(7),
    aten.l1_loss.default: More(4),
    aten.margin_ranking_loss.default: More(12),
    aten.pairwise_distance.default: More(4),
    aten.poisson_nll_loss.default: More(7),
    aten.triplet_margin_loss.default: More(9),
}
"""Operators that are several kernels: what these move beyond one that reads the operands and writes the result."""


def forward_bytes(op: Op) -> float:
    """Bytes that the kernels of the forward move beyond those of one kernel."""
    return MORE_FORWARD[op.target].bytes(op) if op.role == "op" and op.target in MORE_FORWARD else 0.0


def between_bytes(op: Op, one_kernel: float, read: Sequence[float]) -> float:
    """Bytes that the kernels of a derivative move beyond the `one_kernel` bytes of a single one. `read`: what each
    operand has in memory."""
    if op.role != "op" or not op.graded:
        return 0.0
    if op.target in MORE:
        return MORE[op.target].bytes(op) if op.call.ins[0].grad else 0.0
    if op.target not in BY_OPERAND or len(op.call.ins) == 1:
        return 0.0
    out = op.call.outs[0]
    sizes = Sizes(tensor_bytes(out), float(math.prod(out.sizes)), read, out.itemsize)
    moved = SHARED[op.target](sizes) if op.target in SHARED and any(t.grad for t in op.call.ins) else 0.0
    for index, operand in enumerate(op.call.ins):
        if operand.grad:
            moved += BY_OPERAND[op.target](index, sizes)
            broadcast = operand.sizes != out.sizes and op.target is not aten.cdist.default
            moved += sizes.out + sizes.ins[index] if broadcast else 0.0
    return max(0.0, moved - one_kernel)


def tensor_bytes(tensor: Tensor) -> float:
    """Bytes of a whole tensor."""
    return float(math.prod(tensor.sizes) * tensor.itemsize)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the result, of a mask of its size, and of the operands."""

    out: float
    mask: float
    ins: Sequence[float]
    itemsize: int

    def mask_of(self, index: int) -> float:
        """Bytes of a mask of the size of an operand."""
        return self.ins[index] / self.itemsize


def _quotient(index: int, n: Sizes) -> float:
    """gradient / y for x, and -gradient * ((x / y) / y) for y."""
    return n.ins[0] + 2 * n.ins[1] + 8 * n.out if index else 2 * n.out + n.ins[1]


def _larger(index: int, n: Sizes) -> float:
    """where(x == y, gradient / 2, gradient), and zeros where the other one is larger."""
    return 7 * n.out + 2 * sum(n.ins) + 4 * n.mask


def _power(index: int, n: Sizes) -> float:
    """where(y == 0, 0, gradient * (y * x ** (y - 1))) for x, and for y
    where((x == 0) & (y >= 0), 0, gradient * (x ** y * log(x)))."""
    x, y = n.ins
    return 4 * x + y + 7 * n.out + 6 * n.mask if index else x + 5 * y + 8 * n.out + 2 * n.mask


def _divided(index: int, n: Sizes) -> float:
    """gradient * (value / z) for y, and -gradient * (value * y / (z * z)) for z."""
    return (0.0, 2 * n.out + 8 * n.ins[2], 6 * n.out + 3 * (n.ins[1] + n.ins[2]))[index]


def _between(index: int, n: Sizes) -> float:
    """gradient * (1 - weight) for x, gradient * weight for y, and gradient * (y - x) for the weight."""
    x, y, weight = n.ins
    return (2 * n.out + 8 * weight, 2 * n.out + weight, 4 * n.out + x + y)[index]


def _larger_number(index: int, n: Sizes) -> float:
    """Zeros where the other one is larger, or this one is no number: masks of the result's size and of y's."""
    x, y = n.ins
    return 2 * n.out + x + 2 * y + 2 * n.mask_of(1) + (4 if index else 6) * n.mask


def _times_logarithm(index: int, n: Sizes) -> float:
    """where((x == 0) & (y <= 0), 0, gradient * log(y)) for x, and gradient * x / y for y."""
    x, y = n.ins
    return 4 * n.out + x + y if index else 4 * n.out + x + 2 * y + 2 * (n.mask_of(0) + n.mask_of(1)) + 2 * n.mask


BY_OPERAND: dict[Any, Callable[[int, Sizes], float]] = {
    aten.addcdiv.default: _divided,
    aten.addcmul.default: lambda index, n: 2 * n.out + 3 * n.ins[3 - index] if index else 0.0,
    # gradient * y * (1 / (x * x + y * y)) for x, gradient * -x * that for y
    aten.atan2.default: lambda index, n: 5 * n.out + (3 * n.ins[0] if index else n.ins[1]),
    # of a product of rows and rows, and of the squares of both
    aten.cdist.default: lambda index, n: 0.0,
    aten.copysign.Tensor: lambda index, n: 0.0 if index else 7 * n.out + 2 * n.ins[0] + 2 * n.mask_of(0),
    aten.cosine_embedding_loss.default: lambda index, n: 11 * n.ins[index] if index < 2 else 0.0,
    # of the quotient by its norm, and of that; at the size of the rows, not of the result
    aten.cosine_similarity.default: lambda index, n: 22 * n.ins[index],
    aten.div.Tensor: _quotient,
    aten.fmax.default: _larger_number,
    aten.fmin.default: _larger_number,
    aten.fmod.Tensor: lambda index, n: index * (6 * n.out + sum(n.ins)),
    aten.hypot.default: lambda index, n: 5 * n.out + n.ins[index],
    aten.ldexp.Tensor: lambda index, n: 5 * n.out if index else 2 * n.out + 3 * n.ins[1],
    aten.lerp.Scalar: lambda index, n: 2 * n.out,
    aten.lerp.Tensor: _between,
    aten.logaddexp.default: lambda index, n: 8 * n.out + sum(n.ins),
    aten.logaddexp2.default: lambda index, n: 8 * n.out + sum(n.ins),
    aten.maximum.default: _larger,
    aten.minimum.default: _larger,
    aten.mul.Tensor: lambda index, n: 2 * n.out + n.ins[1 - index],
    aten.outer.default: lambda index, n: 2 * n.out + n.ins[1 - index],
    aten.pairwise_distance.default: lambda index, n: n.ins[1] if index else 5 * n.ins[0],
    aten.pow.Tensor_Tensor: _power,
    # the gradients of both come from one kernel
    aten.prelu.default: lambda index, n: n.out if index else 3 * n.out,
    aten.remainder.Tensor: lambda index, n: index * (6 * n.out + sum(n.ins)),
    aten.special_xlog1py.default: lambda index, n: _times_logarithm(index, n) + 2 * n.ins[1] * index,
    aten.sub.Tensor: lambda index, n: 2 * n.out * index,
    aten.where.self: lambda index, n: 2 * n.out + n.ins[0],
    aten.xlogy.Tensor: _times_logarithm,
}
"""Operators that have kernels of their own for the gradient of each operand, at the size of the result; where the
operand is broadcast a sum follows. Bytes that these move without that sum; given is the number of the operand."""

SHARED: dict[Any, Callable[[Sizes], float]] = {
    # where(x * x + y * y == 0, 0, 1 / (x * x + y * y))
    aten.atan2.default: lambda n: 6 * n.out + 3 * sum(n.ins) + 2 * n.mask,
    # where(distance == 0, 0, gradient / distance), and both gradients, whichever is asked for
    aten.cdist.default: lambda n: 10 * n.out + 7 * sum(n.ins) + 2 * n.mask,
}
"""What some of these move once, for all operands."""
