"""Operators written as the common operators that torch computes them with, so that the rules of these apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from passes import edit
from passes._torch import OpOverload
from passes.fake_quantize import FAKE_QUANTIZED
from passes.traced import Bodies, traced

aten = torch.ops.aten


def composed(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: values and provenance.
    does: replaces the operators of the tables below by the common ones that they consist of.
    gives: the same values; grids of images no longer have the number of samples among their arguments."""
    bodies: Bodies = {}
    for node in edit.calls(gm, *COMPOSITE, *WRITTEN):
        assert isinstance(node.target, OpOverload)
        traced(node, WRITTEN.get(node.target, node.target.decompose), bodies)
    gm.recompile()
    return gm


def _rotated(x: Tensor, k: int = 1, dims: tuple[int, int] = (0, 1)) -> Tensor:
    """torch.rot90: a half turn flips both dims; a quarter turn flips one and exchanges both."""
    first, second = dims
    gone = [[], [second], [first, second], [first]][k % 4]
    x = x.flip(gone) if gone else x
    return x.transpose(first, second) if k % 2 else x


def _diagonal_blocks(tensors: list[Tensor]) -> Tensor | None:
    """block_diag: each matrix padded by zeros on the left and right, all concatenated along the rows."""
    matrices = [torch.atleast_2d(each) for each in tensors]
    widths = [each.shape[1] for each in matrices]
    if not all(isinstance(width, int) for width in widths):
        return None
    padded = [F.pad(each, (sum(widths[:i]), sum(widths[i + 1 :]))) for i, each in enumerate(matrices)]
    return torch.cat(padded)


def _distance(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - other, p)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """torch.take: elements by their position in the flattened tensor."""
    return x.reshape(-1)[index]


def _grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor | None:
    """affine_grid: the coordinates of pixels times each sample's matrix; as it is where height or width is symbolic."""
    sizes = size[2:]
    if not all(isinstance(each, int) for each in sizes):
        return None
    places = torch.meshgrid(*(_places(each, align_corners, theta) for each in sizes), indexing="ij")
    rows = torch.stack([*reversed(places), torch.ones_like(places[0])], -1).reshape(-1, len(sizes) + 1)
    return (rows @ theta.transpose(1, 2)).reshape(-1, *sizes, len(sizes))


def _places(size: int, corners: bool, like: Tensor) -> Tensor:
    """The coordinates of `size` pixels on a line from -1 to 1: with the first and last pixel at the ends (`corners`),
    else the centres of `size` equal intervals."""
    if size == 1:
        return like.new_zeros(1)
    end = 1.0 if corners else (size - 1) / size
    return torch.linspace(-end, end, size, dtype=like.dtype, device=like.device)


WRITTEN: dict[Any, Callable[..., Tensor | None]] = {
    aten.affine_grid_generator.default: _grid,
    aten.block_diag.default: _diagonal_blocks,
    aten.dist.default: _distance,
    aten.rot90.default: _rotated,
    aten.take.default: _taken,
    **FAKE_QUANTIZED,
}
"""Operators -> the same with common ones; None: the call stays."""

NAMES = (
    "absolute", "adjoint", "arccos", "arccosh", "arcsin", "arcsinh", "arctan",
    "arctan2", "arctanh", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "clip", "column_stack", "concat",
    "concatenate", "corrcoef", "cov", "cross", "diagflat", "diff", "divide", "dsplit", "dstack", "expand_as",
    "fft_fftshift", "fft_ifftshift", "fix", "fliplr", "flipud", "frobenius_norm", "ger", "greater", "greater_equal",
    "hsplit", "hstack", "kron", "less", "less_equal", "linalg_diagonal", "linalg_matmul", "linalg_vecdot", "meshgrid",
    "moveaxis", "movedim", "msort", "multiply", "narrow", "negative", "not_equal", "positive", "reshape_as",
    "row_stack", "special_digamma", "special_erf", "special_erfc", "special_erfinv", "special_exp2", "special_expit",
    "special_expm1", "special_gammainc", "special_gammaincc", "special_gammaln", "special_i0", "special_log1p",
    "special_log_softmax", "special_logit", "special_logsumexp", "special_multigammaln", "special_polygamma",
    "special_psi", "special_sinc", "special_softmax", "special_xlogy", "std", "std_mean", "subtract", "swapaxes",
    "swapdims", "take_along_dim", "tile", "trapezoid", "trapz", "true_divide", "unflatten", "var", "var_mean",
    "view_as", "vsplit", "vstack",
)  # fmt: skip
"""Operators that torch composes of others: second names, and what is made of few common operators. None of them stops
gradients inside, as cosine_similarity does: a trace below autograd would not see that."""

COMPOSITE = (
    *(
        operator
        for name in NAMES
        for packet in [getattr(aten, name)]
        for operator in (getattr(packet, overload) for overload in packet.overloads())
        if operator._can_decompose() and not operator._schema.is_mutable
    ),
    aten.__and__.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Scalar,
    aten.__or__.Tensor,
    aten.__xor__.Scalar,
    aten.__xor__.Tensor,
    aten.mH.default,
    aten.mT.default,
    aten.matrix_H.default,
    aten.max.other,
    aten.min.other,
    aten.numpy_T.default,
    aten.repeat_interleave.self_int,
)
"""The overloads of these, and single overloads of others."""
