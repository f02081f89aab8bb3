"""Temporary memory of linear algebra on batches of matrices, and of norms, quantiles and short-time Fourier transforms:
rows of the tables in memory.temporaries and memory.cpu_temporaries.

Read off torch's FunctionsManual.cpp, BatchLinearAlgebra.cpp and SpectralOps.cpp. Each function gives bytes on a rank,
from the local sizes of the operands.
"""

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
    """`times` numbers for each row of each matrix: pivots, and what is computed from them."""
    return lambda local: times * local.ins[0] / local.op.call.ins[0].sizes[-1]


def _oblong(local: Local, dims: tuple[int, int] = (-2, -1)) -> tuple[float, float]:
    """For the m x n matrices in two dims of the first operand, bytes of as many square matrices: of max(m, n) rows, and
    of min(m, n) rows; none of empty ones."""
    short, long = sorted(local.op.call.ins[0].sizes[dim] for dim in dims)
    return (local.ins[0] * long / short, local.ins[0] * short / long) if short else (0.0, 0.0)


def _tall(local: Local) -> bool:
    """Whether the matrices have more rows than columns."""
    rows, columns = local.op.call.ins[0].sizes[-2:]
    return rows > columns


def _inverted(local: Local) -> float:
    """Pseudoinverse: singular vectors of both sides, a copy of the right ones divided by the singular values, these
    values and their reciprocals."""
    _, short = _oblong(local)
    size = min(local.op.call.ins[0].sizes[-2:])
    return local.ins[0] + short + (short if _tall(local) else local.ins[0]) + 2 * short / size


def _inverted_back(local: Local) -> float:
    """Nine tensors of the matrices' size, and three products of a matrix with its transpose: of tall ones two of rows x
    rows and one of columns x columns, else three of the shorter side."""
    long, short = _oblong(local)
    return 9 * local.ins[0] + (2 * long + short if _tall(local) else 3 * short)


def _singular_back(local: Local) -> float:
    """SVD: four tensors of the matrices' size, and three squares of their shorter side."""
    return 4 * local.ins[0] + 3 * _oblong(local)[1]


def _factored_back(local: Local) -> float:
    """QR: three tensors of the size of R; of wide matrices two, for the square part and the other columns."""
    return (3 if local.op.call.ins[0].sizes[-2] >= local.op.call.ins[0].sizes[-1] else 2) * local.outs[1]


def _solved_back(local: Local) -> float:
    """Linear solve: gradients at the size of the result, and where the matrices have a gradient the outer product and
    its negative; less the gradients themselves."""
    matrices, wanted = (each.sizes for each in local.op.call.ins)
    size = matrices[-1]
    vectors = len(wanted) == 1 or tuple(wanted) == tuple(matrices[:-1])
    columns = 1 if vectors else wanted[-1 if local.given("left") else -2]
    graded = sum(nbytes for nbytes, each in zip(local.ins, local.op.call.ins, strict=True) if each.grad)
    return max(0.0, local.out + 2 * local.grad(0) * local.out * size / columns - graded)


def _power(local: Local) -> float:
    """The LU factors, where the power is the inverse (n = -1)."""
    return local.ins[0] if local.given("n") == -1 else 0.0


def _power_back(local: Local) -> float:
    """A product of matrices; two for n of -1 and -2, where the gradient of an inverse comes last; none for 0 and 1."""
    return (0 if 0 <= local.given("n") < 2 else 2 if -3 < local.given("n") < 0 else 1) * local.ins[0]


def _matrix_norm(local: Local) -> float:
    """A copy for the singular values, where the norm is of matrices and needs them."""
    dims = matrix_dims(given(local.op.call), len(local.op.call.ins[0].shape))
    return local.ins[0] if dims is not None and local.given("ord") in SPECTRAL else 0.0


def _matrix_norm_back(local: Local) -> float:
    """Norms of singular values: a product of the singular vectors of the shorter side. Norms of vectors: signs or
    powers; of order infinity also masks of the extreme elements."""
    dims, order = matrix_dims(given(local.op.call), len(local.op.call.ins[0].shape)), local.given("ord")
    if dims is not None:
        return _oblong(local, dims)[1] if order in SPECTRAL else local.ins[0]
    if order in (math.inf, -math.inf):
        return taken("3w+m+3o")(local)
    return taken("2w+m" if isinstance(order, (int, float)) and order < 1 else "w")(local)


def _sorted(local: Local) -> float:
    """Indices (int64) of one row while it is sorted, and two tensors of the result for the interpolation."""
    dim, tensor = local.given("dim"), local.op.call.ins[0]
    count = tensor.sizes[dim] if dim is not None else local.ins[0] / tensor.itemsize
    return 8 * count + 2 * local.out


def _frames(local: Local, spectrum: int) -> float:
    """Frames of a signal, by their spectrum, which is an operand or a result: of real numbers half of the
    frequencies."""
    call = local.op.call
    (nbytes, sizes) = (local.ins[0], call.ins[0].sizes) if spectrum == 0 else (local.out, call.outs[0].sizes)
    frequencies = sizes[-2 if spectrum == 0 or local.given("return_complex") else -3]
    return nbytes * local.given("n_fft") / (2 * frequencies)


def _framed(local: Local) -> float:
    """STFT: a contiguous copy of the frames of several signals without a window (with one, the product is
    contiguous)."""
    return _frames(local, -1) if len(local.ins) == 1 and math.prod(local.op.call.ins[0].sizes[:-1]) > 1 else 0.0


def _framed_back(local: Local) -> float:
    """Backward of the STFT: the two-sided spectrum before and after the transform, less the gradient of the signal,
    which is made later."""
    return max(0.0, 4 * _frames(local, -1) - local.ins[0])


def _joined_frames(local: Local) -> float:
    """Inverse STFT: frames before and after the window, and the padded signal, from which the result is sliced."""
    frames, count, size = _frames(local, 0), local.op.call.ins[0].sizes[-1], local.given("n_fft")
    hop = local.given("hop_length") or size // 4
    return 2 * frames + frames * (size + hop * (count - 1)) / (size * count)


def _joined_frames_back(local: Local) -> float:
    """Backward of the inverse STFT: the frames, after the gradient of the signal is freed."""
    return max(0.0, _frames(local, 0) - local.out)


def _eigen(local: Local) -> float:
    """The workspace of LAPACK's syevd (divide and conquer), for one matrix at a time: floating-point and integer."""
    tensor = local.op.call.ins[0]
    size = tensor.sizes[-1]
    return float(
        tensor.itemsize * (2 * size**2 + 6 * size + 1) + 4 * (5 * size + 3)
        if tensor.grad or local.op.target is aten.linalg_eigh.default
        else tensor.itemsize * (2 * size + 1)
    )


def _least(local: Local) -> float:
    """Bytes of as many square matrices, of min(m, n) rows for m x n matrices."""
    return _oblong(local)[1]


def _by_lapack(local: Local) -> bool:
    """Whether the first operand is column-major, as LAPACK reads matrices; it copies others."""
    step = facts.tensors(edit.tensor_operands(local.op.node)[0])[0].stride()[-2]
    return isinstance(step, int) and step == 1


def _copied(local: Local) -> float:
    """A column-major copy of the first operand, where it is not."""
    return 0.0 if _by_lapack(local) else local.ins[0]


def _lower_and_upper_back(local: Local) -> float:
    """LU: three products of triangles, or the gradient that both are joined to, if that is larger
    (linalg_lu_backward)."""
    return max(3 * _least(local), local.ins[0])


def _factors_back(local: Local) -> float:
    """LU factors: the unpacked triangles and the permutation matrix, and what the backward of LU takes."""
    orders = _oblong(local)[0 if _tall(local) else 1] * local.given("pivot")
    return orders + local.ins[0] + _least(local) + _lower_and_upper_back(local)


def _unpacked(local: Local) -> float:
    """Two numbers per row for the permutation; later a copy of the triangle of matrices that are not square. The larger
    of the two."""
    square = local.op.call.ins[0].sizes[-1] == local.op.call.ins[0].sizes[-2]
    return max(_rows(2)(local), 0.0 if square else _least(local))


def _unpacked_back(local: Local) -> float:
    """Both triangles and their sum, or one triangle and the whole gradient, whichever is larger; less the gradient."""
    return max(3 * _least(local), _least(local) + local.ins[0]) - local.ins[0]


def _by_factors_back(local: Local) -> float:
    """Backward of linalg.lu_solve. For the right-hand side: another solution. For the factors: both triangles, two
    products, a solution and its triangle; where rows are permuted, which takes another square, also the result while
    products are made from it (linalg_lu_solve_backward)."""
    if not local.grad(0):
        return _copied(local)
    ordered = local.given("left") == local.given("adjoint")
    return (max(6 * local.ins[0] + local.out, 7 * local.ins[0]) if ordered else 6 * local.ins[0]) - local.ins[0]


def _reflected_back(local: Local) -> float:
    """Backward of householder_product: the reflections, and two squares of their rows, in which the loop over them
    works; and a few numbers per reflection and per row (householder_product_backward)."""
    (matrices, factors), sizes = local.ins[:2], local.op.call.ins[0].sizes
    return matrices * (1 + (2 * sizes[-2] + 2) / sizes[-1]) + 3 * factors - factors * local.grad(1)


def _turned_back(local: Local) -> float:
    """Backward of ormqr: as `_reflected_back` where a reflection has a gradient (both gradients are then computed);
    else the column-major copy."""
    if not (local.grad(0) or local.grad(1)):
        return _copied(local)
    return _reflected_back(local) + local.ins[0] * (not local.grad(0))


def _spectral(local: Local) -> bool:
    """Whether a condition number is computed from singular values."""
    return local.given("p") is None or local.given("p") in SPECTRAL


def _condition(local: Local) -> float:
    """A copy for the singular values; of other norms the inverse, and the LU factors with their pivots."""
    return local.ins[0] if _spectral(local) else 2 * local.ins[0] + _rows(2)(local)


def _condition_back(local: Local) -> float:
    """The singular vectors times the gradients of the singular values, and these gradients."""
    return _least(local) * (1 + 1 / min(local.op.call.ins[0].sizes[-2:]))


def _as_complex(local: Local) -> float:
    """Bytes of the matrices in complex numbers."""
    return local.ins[0] * local.op.call.outs[0].itemsize / local.op.call.ins[0].itemsize


def _eigenvalues_back(local: Local) -> float:
    """Eigenvectors times the gradients of the eigenvalues, and a linear solve: a copy, the LU factors with their
    pivots, and the result."""
    return 4 * _as_complex(local) + _rows(1)(local) - local.ins[0]


def _eigenvalues(local: Local) -> float:
    """Eigenvalues as real and imaginary parts, a copy, the eigenvectors in real numbers, and the workspace of LAPACK's
    geev for one matrix at a time, in blocks of MKL's sizes."""
    tensor = local.op.call.ins[0]
    size = tensor.sizes[-1]
    block = 2 * VECTORS if tensor.grad and size >= BLOCKED else HESSENBERG
    return local.out + (1 + tensor.grad) * local.ins[0] + tensor.itemsize * (2 + block) * size


HESSENBERG, VECTORS, BLOCKED = 32, 192, 12
"""Rows of the blocks in which MKL makes a matrix triangular (gehrd), and its eigenvectors (trevc3), these of matrices
from that size on."""

PSEUDOINVERSES = (
    "linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor linalg_pinv.default linalg_pinv.rcond_tensor "
    "pinverse.default"
)
RANKS = (
    "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.default "
    "linalg_matrix_rank.tol_tensor"
)
NORMS = "linalg_matrix_norm.default linalg_matrix_norm.str_ord linalg_norm.default linalg_norm.ord_str"

FORWARD: dict[Any, Bytes] = {
    **rows(
        {
            "a": "inverse linalg_inv linalg_inv_ex linalg_svd linalg_svdvals",
            "2a": "nanquantile.scalar",
            "2w+m": "nanmean",
            "10a": "linalg_matrix_exp matrix_exp",
        }
    ),
    **dict.fromkeys(
        named("det.default linalg_det.default linalg_slogdet.default logdet.default slogdet.default"), _rows(3)
    ),
    **dict.fromkeys(named(NORMS), _matrix_norm),
    **dict.fromkeys(named("linalg_matrix_power.default matrix_power.default"), _power),
    **dict.fromkeys(named(PSEUDOINVERSES), _inverted),
    # singular values, and what they are compared with
    **dict.fromkeys(named(RANKS), lambda local: 3 * local.ins[0] / max(local.op.call.ins[0].sizes[-2:])),
    **dict.fromkeys(named("stft.center stft.default"), _framed),
    **dict.fromkeys((aten.linalg_cond.default, aten.linalg_cond.p_str), _condition),
    aten.istft.default: _joined_frames,
    # factors with their pivots, before they are taken apart
    aten.linalg_lu.default: lambda local: local.ins[0] + _rows(1)(local),
    aten.linalg_lu_solve.default: _copied,
    aten.linalg_qr.default: lambda local: local.outs[1] * _tall(local),
    aten.lu_unpack.default: _rows(2),
    aten.ormqr.default: _copied,
    aten.quantile.scalar: _sorted,
}
"""Operator -> temporary bytes in the forward."""

BACKWARD: dict[Any, Bytes] = {
    **rows(
        {
            "a": "linalg_eigvalsh linalg_slogdet logdet slogdet",
            "2a": "det inverse linalg_det linalg_inv linalg_inv_ex",
            "3a": "linalg_cholesky_ex linalg_eigh",
            "47a": "linalg_matrix_exp matrix_exp",
            "w+2m": "nanmean",
        }
    ),
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
"""Operator -> temporary bytes in the backward."""

CPU: dict[Any, tuple[Bytes, Bytes]] = {
    **{target: (_eigen, BACKWARD[target]) for target in named("linalg_eigh.default linalg_eigvalsh.default")},
    aten.linalg_eigvals.default: (_eigenvalues, _eigenvalues_back),
    aten.lu_unpack.default: (_unpacked, _unpacked_back),
}
"""Operator -> (forward, backward) on a CPU, where LAPACK or the kernels of triangles allocate other temporaries."""
