"""Kinds of ops that several passes need to know."""

from __future__ import annotations

import torch

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The `reduction` argument of ATen losses (at::Reduction)."""

UNARY = (
    aten.abs.default, aten.bitwise_not.default, aten.ceil.default, aten.clamp.default, aten.clamp_max.default,
    aten.clamp_min.default, aten.cos.default, aten.dropout.default, aten.elu.default, aten.erf.default,
    aten.exp.default, aten.floor.default, aten.gelu.default, aten.hardsigmoid.default, aten.hardswish.default,
    aten.hardtanh.default, aten.leaky_relu.default, aten.log.default, aten.log1p.default, aten.logical_not.default,
    aten.mish.default, aten.neg.default, aten.pow.Tensor_Scalar, aten.reciprocal.default, aten.relu.default,
    aten.relu6.default, aten.rsqrt.default, aten.sigmoid.default, aten.silu.default, aten.sin.default,
    aten.softplus.default, aten.sqrt.default, aten.square.default, aten.tanh.default, aten.to.dtype,
)  # fmt: skip
"""Pointwise ops of one tensor."""

BINARY = (
    aten.add.Tensor, aten.div.Tensor, aten.eq.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar,
    aten.maximum.default, aten.minimum.default, aten.mul.Tensor, aten.ne.Scalar, aten.pow.Tensor_Tensor,
    aten.rsub.Scalar, aten.sub.Tensor,
)  # fmt: skip
"""Pointwise ops of two operands that broadcast; the second may be a number."""

CONTRACTIONS = (aten.linear.default, aten.matmul.default)
"""Products with a matrix, as normalised graphs have them."""

LAST_DIM = (aten.gather.default, aten.softmax.int, aten.log_softmax.int)
"""Ops whose second argument is the one dim that they work along, and that keep all others."""

VIEWS = (
    aten._conj.default, aten.chunk.default, aten.detach.default, aten.diagonal.default,
    aten.expand.default, aten.imag.default, aten.permute.default,
    aten.real.default, aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default,
    aten.transpose.int, aten.unbind.int, aten.unfold.default, aten.unsqueeze.default,
)  # fmt: skip
"""Ops that (nearly always) move no bytes: their result looks at the memory of their operand."""
