"""What linear algebra of batches of matrices takes for itself, and what norms, quantiles and Fourier transforms of frames do (FunctionsManual.cpp, BatchLinearAlgebra.cpp, SpectralOps.cpp)."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.memory.local import Bytes, Local, rows, taken
from autopar.rules.arguments import given, named
from passes import edit, facts
from passes.kernel_extras import SPECTRAL, matrix_dims

aten = torch.ops.aten


def _rows(times: float) -> Bytes:
    """So many numbers for each row of each matrix: pivots, and what is made of them."""
    return lambda local: times * local.ins[0] / local.op.call.ins[0].sizes[-1]


def _oblong(local: Local, dims: tuple[int, int] = (-2, -1)) -> tuple[float, float]:
    """Of the matrices that are two dims of the first operand, bytes of as many squares with their longer sides, and with their shorter ones."""
    short, long = sorted(local.op.call.ins[0].sizes[dim] for dim in dims)
    return local.ins[0] * long / short, local.ins[0] * short / long


def _tall(local: Local) -> bool:
    rows, columns = local.op.call.ins[0].sizes[-2:]
    return rows > columns


def _inverted(local: Local) -> float:
    """Singular vectors on both sides, of which those of columns as a copy, divided by the values; and the values, and what they are divided into."""
    _, short = _oblong(local)
    size = min(local.op.call.ins[0].sizes[-2:])
    return local.ins[0] + short + (short if _tall(local) else local.ins[0]) + 2 * short / size


def _inverted_back(local: Local) -> float:
    """Nine of the matrices, and three products of them by themselves: squares of rows, where there are more of these two, and one of columns."""
    long, short = _oblong(local)
    return 9 * local.ins[0] + (2 * long + short if _tall(local) else 3 * short)


def _singular_back(local: Local) -> float:
    """Four of the matrices, and three of the squares with their shorter sides."""
    return 4 * local.ins[0] + 3 * _oblong(local)[1]


def _factored_back(local: Local) -> float:
    """Three of the triangles; of matrices with more columns two, the square of rows and the rest of the columns."""
    return (3 if local.op.call.ins[0].sizes[-2] >= local.op.call.ins[0].sizes[-1] else 2) * local.outs[1]


def _solved_back(local: Local) -> float:
    """Gradients as the result is broadcast, and of the matrices the product that is negated to theirs."""
    matrices, wanted = (each.sizes for each in local.op.call.ins)
    size = matrices[-1]
    vectors = len(wanted) == 1 or tuple(wanted) == tuple(matrices[:-1])
    columns = 1 if vectors else wanted[-1 if local.given("left") else -2]
    graded = sum(nbytes for nbytes, each in zip(local.ins, local.op.call.ins, strict=True) if each.grad)
    return max(0.0, local.out + 2 * local.grad(0) * local.out * size / columns - graded)


def _power(local: Local) -> float:
    """LU factors of an inverse, where that is the result."""
    return local.ins[0] if local.given("n") == -1 else 0.0


def _power_back(local: Local) -> float:
    """A product; two where the last one is the gradient of an inverse."""
    return (0 if 0 <= local.given("n") < 2 else 2 if -3 < local.given("n") < 0 else 1) * local.ins[0]


def _matrix_norm(local: Local) -> float:
    """A copy that singular values are taken of."""
    dims = matrix_dims(given(local.op.call), len(local.op.call.ins[0].shape))
    return local.ins[0] if dims is not None and local.given("ord") in SPECTRAL else 0.0


def _matrix_norm_back(local: Local) -> float:
    """Of singular values the vectors of the shorter side, multiplied; of vectors signs or powers, and of their greatest numbers where these are."""
    dims, order = matrix_dims(given(local.op.call), len(local.op.call.ins[0].shape)), local.given("ord")
    if dims is not None:
        return _oblong(local, dims)[1] if order in SPECTRAL else local.ins[0]
    if order in (math.inf, -math.inf):
        return taken("3w+m+3o")(local)
    return taken("2w+m" if isinstance(order, (int, float)) and order < 1 else "w")(local)


def _sorted(local: Local) -> float:
    """Places of one row while it is sorted, and of each result what is between two numbers."""
    dim, tensor = local.given("dim"), local.op.call.ins[0]
    count = tensor.sizes[dim] if dim is not None else local.ins[0] / tensor.itemsize
    return 8 * count + 2 * local.out


def _frames(local: Local, spectrum: int) -> float:
    """Frames of a signal, by their spectrum, which is an operand or a result: of real numbers half of the frequencies."""
    call = local.op.call
    (nbytes, sizes) = (local.ins[0], call.ins[0].sizes) if spectrum == 0 else (local.out, call.outs[0].sizes)
    frequencies = sizes[-2 if spectrum == 0 or local.given("return_complex") else -3]
    return nbytes * local.given("n_fft") / (2 * frequencies)


def _framed(local: Local) -> float:
    """Frames of several signals are put in order, where no window has been laid on them."""
    return _frames(local, -1) if len(local.ins) == 1 and math.prod(local.op.call.ins[0].sizes[:-1]) > 1 else 0.0


def _framed_back(local: Local) -> float:
    """All frequencies of each frame, before and behind the transform; that of the signal is made behind them."""
    return max(0.0, 4 * _frames(local, -1) - local.ins[0])


def _joined_frames(local: Local) -> float:
    """Frames, before and behind the window, and the signal with its ends, from which it is cut out."""
    frames, count, size = _frames(local, 0), local.op.call.ins[0].sizes[-1], local.given("n_fft")
    hop = local.given("hop_length") or size // 4
    return 2 * frames + frames * (size + hop * (count - 1)) / (size * count)


def _joined_frames_back(local: Local) -> float:
    """The frames, when the gradient of the signal is gone."""
    return max(0.0, _frames(local, 0) - local.out)


def _eigen(local: Local) -> float:
    """What LAPACK's divide and conquer works in, for one matrix after the other: numbers, and places (syevd)."""
    tensor = local.op.call.ins[0]
    size = tensor.sizes[-1]
    return float(tensor.itemsize * (2 * size**2 + 6 * size + 1) + 4 * (5 * size + 3) if tensor.grad or local.op.target is aten.linalg_eigh.default else tensor.itemsize * (2 * size + 1))


def _least(local: Local) -> float:
    """Squares with the shorter sides of the matrices."""
    return _oblong(local)[1]


def _by_lapack(local: Local) -> bool:
    """Whether the first operand rests column by column, as LAPACK reads matrices: it copies others."""
    step = facts.tensors(edit.tensor_operands(local.op.node)[0])[0].stride()[-2]
    return isinstance(step, int) and step == 1


def _copied(local: Local) -> float:
    """Matrices in the order of LAPACK."""
    return 0.0 if _by_lapack(local) else local.ins[0]


def _lower_and_upper_back(local: Local) -> float:
    """Of triangles three products, or the gradient as it is joined of both, when that is larger (linalg_lu_backward)."""
    return max(3 * _least(local), local.ins[0])


def _factors_back(local: Local) -> float:
    """The same, of triangles that are unpacked first, and what orders the rows."""
    orders = _oblong(local)[0 if _tall(local) else 1] * local.given("pivot")
    return orders + local.ins[0] + _least(local) + _lower_and_upper_back(local)


def _unpacked(local: Local) -> float:
    """The order of rows, in two numbers each; then the triangle of matrices that are no squares as a copy."""
    square = local.op.call.ins[0].sizes[-1] == local.op.call.ins[0].sizes[-2]
    return max(_rows(2)(local), 0.0 if square else _least(local))


def _unpacked_back(local: Local) -> float:
    """Both triangles and their sum; where that is only a part of the gradient, one triangle and all of it."""
    return max(3 * _least(local), _least(local) + local.ins[0]) - local.ins[0]


def _by_factors_back(local: Local) -> float:
    """Of what is solved for another solution. Of the factors both triangles, two products, a solution and its triangle; where rows are put in order, by another square, the result too,
    as long as products are made of it (linalg_lu_solve_backward)."""
    if not local.grad(0):
        return _copied(local)
    ordered = local.given("left") == local.given("adjoint")
    return (max(6 * local.ins[0] + local.out, 7 * local.ins[0]) if ordered else 6 * local.ins[0]) - local.ins[0]


def _reflected_back(local: Local) -> float:
    """The reflections, and two squares of their rows, which the loop over them works in; of each reflection and of each row a few numbers (householder_product_backward)."""
    (matrices, factors), sizes = local.ins[:2], local.op.call.ins[0].sizes
    return matrices * (1 + (2 * sizes[-2] + 2) / sizes[-1]) + 3 * factors - factors * local.grad(1)


def _turned_back(local: Local) -> float:
    """The same where the reflections have gradients, of which both are made; else what they are copied for."""
    if not (local.grad(0) or local.grad(1)):
        return _copied(local)
    return _reflected_back(local) + local.ins[0] * (not local.grad(0))


def _spectral(local: Local) -> bool:
    """Whether a condition number is the quotient of singular values, or of sums of them."""
    return local.given("p") is None or local.given("p") in SPECTRAL


def _condition(local: Local) -> float:
    """A copy that singular values are taken of; or the inverse, and LU factors with their pivots."""
    return local.ins[0] if _spectral(local) else 2 * local.ins[0] + _rows(2)(local)


def _condition_back(local: Local) -> float:
    """Singular vectors times the gradients of the values, and these."""
    return _least(local) * (1 + 1 / min(local.op.call.ins[0].sizes[-2:]))


def _as_complex(local: Local) -> float:
    """The matrices as complex numbers."""
    return local.ins[0] * local.op.call.outs[0].itemsize / local.op.call.ins[0].itemsize


def _eigenvalues_back(local: Local) -> float:
    """Vectors times the gradients of the values, and what they are solved for by: a copy, LU factors with their pivots, and the result."""
    return 4 * _as_complex(local) + _rows(1)(local) - local.ins[0]


def _eigenvalues(local: Local) -> float:
    """Values in two parts, a copy, the vectors of real numbers, and what LAPACK works in for one matrix after the other (geev). It takes blocks of the sizes that the library has."""
    tensor = local.op.call.ins[0]
    size = tensor.sizes[-1]
    block = 2 * VECTORS if tensor.grad and size >= BLOCKED else HESSENBERG
    return local.out + (1 + tensor.grad) * local.ins[0] + tensor.itemsize * (2 + block) * size


HESSENBERG, VECTORS, BLOCKED = 32, 192, 12
"""Rows of the blocks in which MKL makes a matrix triangular (gehrd), and its eigenvectors (trevc3), these of matrices from that size on."""

PSEUDOINVERSES = "linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor linalg_pinv.default pinverse.default"
NORMS = "linalg_matrix_norm.default linalg_matrix_norm.str_ord linalg_norm.default linalg_norm.ord_str"

FORWARD: dict[Any, Bytes] = {
    **rows({"a": "inverse linalg_inv linalg_inv_ex linalg_svd linalg_svdvals", "2a": "nanquantile.scalar", "2w+m": "nanmean", "10a": "linalg_matrix_exp matrix_exp"}),
    **dict.fromkeys(named("det.default linalg_det.default linalg_slogdet.default logdet.default slogdet.default"), _rows(3)),
    **dict.fromkeys(named(NORMS), _matrix_norm),
    **dict.fromkeys(named("linalg_matrix_power.default matrix_power.default"), _power),
    **dict.fromkeys(named(PSEUDOINVERSES), _inverted),
    **dict.fromkeys(named("stft.center stft.default"), _framed),
    **dict.fromkeys((aten.linalg_cond.default, aten.linalg_cond.p_str), _condition),
    aten.istft.default: _joined_frames,
    aten.linalg_lu.default: lambda local: local.ins[0] + _rows(1)(local),  # factors with their pivots, before they are taken apart
    aten.linalg_lu_solve.default: _copied,
    aten.linalg_qr.default: lambda local: local.outs[1] * _tall(local),
    aten.lu_unpack.default: _rows(2),
    aten.ormqr.default: _copied,
    aten.quantile.scalar: _sorted,
}
"""While the forward runs."""

BACKWARD: dict[Any, Bytes] = {
    **rows({"a": "linalg_eigvalsh linalg_slogdet logdet slogdet", "2a": "det inverse linalg_det linalg_inv linalg_inv_ex", "3a": "linalg_cholesky_ex linalg_eigh", "47a": "linalg_matrix_exp matrix_exp", "w+2m": "nanmean"}),
    **dict.fromkeys(named(NORMS), _matrix_norm_back),
    **dict.fromkeys(named("linalg_matrix_power.default matrix_power.default"), _power_back),
    **dict.fromkeys(named("nanquantile.scalar quantile.scalar"), lambda local: max(0.0, local.ins[0] - 3 * local.out)),
    **dict.fromkeys(named(PSEUDOINVERSES), _inverted_back),
    **dict.fromkeys(named("stft.center stft.default"), _framed_back),
    **dict.fromkeys((aten.linalg_cond.default, aten.linalg_cond.p_str), _condition_back),
    **dict.fromkeys((aten.linalg_lu_factor.default, aten.linalg_lu_factor_ex.default), _factors_back),
    aten.istft.default: _joined_frames_back,
    aten.linalg_eigvals.default: _eigenvalues_back,
    aten.linalg_householder_product.default: _turned_back,
    aten.linalg_lu.default: _lower_and_upper_back,
    aten.linalg_lu_solve.default: _by_factors_back,
    aten.linalg_qr.default: _factored_back,
    aten.linalg_solve.default: _solved_back,
    aten.linalg_svd.default: _singular_back,
    aten.linalg_svdvals.default: _least,
    aten.lu_unpack.default: _unpacked_back,
    aten.ormqr.default: _turned_back,
}
"""While the backward runs."""

CPU: dict[Any, tuple[Bytes, Bytes]] = {
    **{target: (_eigen, BACKWARD[target]) for target in named("linalg_eigh.default linalg_eigvalsh.default")},
    aten.linalg_eigvals.default: (_eigenvalues, _eigenvalues_back),
    aten.lu_unpack.default: (_unpacked, _unpacked_back),
}
"""Both of those for which LAPACK takes more, or the kernels of triangles."""
