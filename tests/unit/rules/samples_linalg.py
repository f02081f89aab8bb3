"""Samples of linear algebra."""

from __future__ import annotations

import torch

from tests.unit.rules.samples import Samples, T, case, f

aten = torch.ops.aten


def d(*shape: int) -> T:
    """Symmetric positive definite matrices."""
    return T(shape, "d")


SOLVED = [
    case(d(5, 4, 4), f(5, 4, 6)),
    case(d(4, 4), f(4, 6)),
    case(d(5, 4, 4), f(5, 6, 4), left=False),
    case(d(5, 4, 4), f(5, 4)),
    case(d(4, 4), f(4)),
    case(d(4, 4), f(5, 4, 6)),
]
MATRICES = [case(d(5, 4, 4)), case(d(4, 4)), case(d(6, 5, 3, 3))]
OBLONG = [case(f(5, 4, 3)), case(f(4, 6))]
PIVOTS = torch.tensor([[2, 4, 3, 4]] * 5, dtype=torch.int32)
SMALL = torch.full((5,), 1e-9, dtype=torch.float64)
TOLERANCE = [case(f(5, 4, 3), SMALL), case(f(5, 4, 6), SMALL)]
TOLERANCES = [*OBLONG, case(f(5, 4, 3), atol=SMALL), case(f(5, 4, 6), atol=SMALL)]
CONSTANT = [case(T((5, 4, 4), "c")), case(T((4, 4), "c"))]
POWERS = [case(d(5, 4, 4), 3), case(d(4, 4), 2)]

LINALG: Samples = {
    **dict.fromkeys(
        (
            aten.det.default,
            aten.inverse.default,
            aten.linalg_det.default,
            aten.linalg_eigvalsh.default,
            aten.linalg_inv.default,
            aten.linalg_matrix_exp.default,
            aten.linalg_cholesky_ex.default,
            aten.linalg_inv_ex.default,
            aten.linalg_cond.default,
            aten.linalg_eigvals.default,
            aten.linalg_lu_factor.default,
            aten.linalg_lu_factor_ex.default,
            aten.linalg_slogdet.default,
            aten.logdet.default,
            aten.matrix_exp.default,
            aten.slogdet.default,
        ),
        MATRICES,
    ),
    **dict.fromkeys(
        (
            aten.linalg_pinv.atol_rtol_float,
            aten.linalg_qr.default,
            aten.linalg_svdvals.default,
            aten.pinverse.default,
        ),
        OBLONG,
    ),
    **dict.fromkeys((aten.linalg_matrix_power.default, aten.matrix_power.default), POWERS),
    **dict.fromkeys(
        (aten.linalg_matrix_rank.atol_rtol_tensor, aten.linalg_pinv.atol_rtol_tensor),
        TOLERANCES,
    ),
    **dict.fromkeys(
        (aten.linalg_matrix_rank.tol_tensor, aten.linalg_pinv.rcond_tensor),
        TOLERANCE,
    ),
    aten.linalg_matrix_rank.atol_rtol_float: OBLONG,
    **dict.fromkeys((aten.linalg_ldl_factor.default, aten.linalg_ldl_factor_ex.default), CONSTANT),
    aten.linalg_cond.p_str: [case(T((5, 4, 4), "c"), "fro"), case(d(5, 4, 4), "nuc")],
    aten.linalg_householder_product.default: [case(f(5, 4, 3), T((5, 3), "sig"))],
    aten.linalg_lu.default: [case(f(5, 4, 6)), case(d(4, 4))],
    aten.linalg_lu_solve.default: [
        case(d(5, 4, 4), PIVOTS, f(5, 4, 6)),
        case(d(5, 4, 4), PIVOTS, f(5, 6, 4), left=False),
        case(d(4, 4), PIVOTS[0], f(4, 6), adjoint=True),
    ],
    aten.linalg_matrix_rank.default: [case(f(5, 4, 3), 1e-9), case(f(4, 6), 1e-9)],
    aten.lu_unpack.default: [case(f(5, 4, 4), PIVOTS)],
    aten.ormqr.default: [
        case(f(5, 4, 3), T((5, 3), "sig"), f(5, 4, 6)),
        case(f(5, 4, 3), T((5, 3), "sig"), f(5, 6, 4), False),
        case(f(4, 3), T((3,), "sig"), f(4, 6), True, True),
    ],
    aten.linalg_eigh.default: [case(d(5, 4, 4)), case(d(4, 4), "U")],
    aten.linalg_pinv.default: [case(f(5, 4, 3), 1e-9)],
    aten.linalg_solve.default: [*SOLVED, case(d(5, 4, 4), f(4))],
    aten.linalg_svd.default: [case(f(5, 4, 3), False), case(f(4, 4))],
    aten.cholesky.default: [case(d(5, 4, 4)), case(d(4, 4))],
    aten.cholesky_inverse.default: [case(d(5, 4, 4)), case(d(4, 4))],
    aten.cholesky_solve.default: [case(f(5, 4, 6), d(5, 4, 4)), case(f(4, 6), d(4, 4))],
    aten.diag.default: [case(f(5, 4)), case(f(5), 1)],
    aten.diag_embed.default: [case(f(5, 6, 4)), case(f(5, 4), 1), case(f(5, 6, 4), 0, 0, 2), case(f(4), -1)],
    aten.diagonal.default: [case(f(5, 4, 4), 0, -2, -1), case(f(5, 4, 6), 1, 0, 2), case(f(4, 6))],
    aten.diagonal_scatter.default: [
        case(f(5, 4, 4), f(5, 4), 0, -2, -1),
        case(f(4, 5, 6), f(5, 4), 1, 0, 2),
        case(f(4, 6), f(4)),
    ],
    aten.linalg_cholesky.default: [case(d(5, 4, 4)), case(d(4, 4), upper=True), case(d(6, 5, 3, 3))],
    aten.linalg_solve_triangular.default: [
        case(d(5, 4, 4), f(5, 4, 6), upper=False),
        case(d(5, 4, 4), f(5, 6, 4), upper=True, left=False),
        case(d(4, 4), f(4, 6), upper=False),
    ],
    aten.trace.default: [case(f(4, 4))],
}
