"""Linear algebra on matrices: the two dims of a matrix are whole, all dims before them are cut. And diagonals of
tensors."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import Spec, given, line, named, rank_of, replicated, rule, words
from autopar.rules.language import Call
from autopar.rules.rule import Rule

aten = torch.ops.aten


def _diagonal_of(call: Call) -> tuple[str, str]:
    """The words of a tensor with two whole dims, and those of their diagonal, which is the last dim."""
    rank, arguments = rank_of(call), given(call)
    whole = {arguments["dim1"] % rank: "x!", arguments["dim2"] % rank: "y!"}
    return line(rank, whole), " ".join([word for dim, word in enumerate(words(rank)) if dim not in whole] + ["z!"])


def diagonal(call: Call) -> str:
    """The two dims, and the diagonal, are whole."""
    whole, part = _diagonal_of(call)
    return rule([whole], [part])


def diagonal_scatter(call: Call) -> str:
    """A tensor with its diagonal replaced; as `diagonal`."""
    whole, part = _diagonal_of(call)
    return rule([whole, part], [whole])


def diag_embed(call: Call) -> str:
    """The last dim becomes the diagonal of two new dims; all three are whole."""
    rank, arguments = rank_of(call) + 1, given(call)
    new = {arguments["dim1"] % rank: "x!", arguments["dim2"] % rank: "y!"}
    others = iter(words(rank - 2))
    return rule([" ".join([*words(rank - 2), "z!"])], [" ".join(new.get(dim) or next(others) for dim in range(rank))])


def with_tolerances(plain: str) -> Spec:
    """The rule `plain` of one matrix each; further operands are a tolerance for each, or for all."""
    left, right = plain.split(" -> ")
    return lambda call: rule([left, *("..." for _ in call.ins[1:])], [right])


def triangular(call: Call) -> str:
    """A triangular matrix A and right-hand sides B: columns of B can be cut for A X = B, rows for X A = B (`left` is
    false)."""
    return "... i! j!, ... i! k -> ... i! k" if given(call)["left"] else "... i! j!, ... k i! -> ... k i!"


def solve(call: Call) -> str:
    """As `triangular`; B may be one vector per matrix."""
    matrices, wanted = (t.shape for t in call.ins)
    return "... i! j!, ... i! -> ... i!" if len(wanted) == 1 or wanted == matrices[:-1] else triangular(call)


def factored(call: Call) -> str:
    """As `triangular`, with A as LU factors and pivots."""
    return f"... i! j!, ... i!, ... {'i! k -> ... i! k' if given(call)['left'] else 'k i! -> ... k i!'}"


def reflected(call: Call) -> str:
    """ormqr: a product of reflections times a matrix on its right (columns can be cut) or on its left (rows)."""
    left = bool(given(call)["left"])
    return f"... i! j!, ... r!, ... {'m! k -> ... m! k' if left else 'k m! -> ... k m!'}"


MATRICES = {
    "... i! j! -> ...": """det.default linalg_cond.default linalg_cond.p_str linalg_det.default
    linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
        linalg_matrix_rank.default linalg_matrix_rank.tol_tensor logdet.default""",
    "... i! j! -> ..., ...": "linalg_slogdet.default slogdet.default",
    "... i! j! -> ... k!": "linalg_eigvals.default linalg_eigvalsh.default linalg_svdvals.default",
    "... i! j! -> ... k!, ... x! y!": "linalg_eigh.default",
    "... i! j! -> ... x! y!": """inverse.default linalg_inv.default linalg_matrix_exp.default
    linalg_matrix_power.default linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor
        linalg_pinv.default linalg_pinv.rcond_tensor matrix_exp.default matrix_power.default pinverse.default""",
    "... i! j! -> ... x! y!, ...": "linalg_cholesky_ex.default linalg_inv_ex.default",
    "... i! j! -> ... x! y!, ... z!": "linalg_ldl_factor.default linalg_lu_factor.default",
    "... i! j! -> ... x! y!, ... z!, ...": "linalg_ldl_factor_ex.default linalg_lu_factor_ex.default",
    "... i! j! -> ... x! y!, ... k! l!, ... m! n!": "linalg_lu.default",
    "... i! j! -> ... x! y!, ... k! l!": "linalg_qr.default",
    "... i! j! -> ... x! y!, ... z!, ... k! l!": "linalg_svd.default",
}
"""Rule -> operators whose results are computed from one matrix each."""

RULES: dict[Any, Rule] = {
    **{op: Rule(with_tolerances(text)) for text, names in MATRICES.items() for op in named(names)},
    aten.cholesky.default: Rule("... i! j! -> ... i! j!"),
    aten.cholesky_inverse.default: Rule("... i! j! -> ... i! j!"),
    aten.cholesky_solve.default: Rule("... i! k, ... i! j! -> ... i! k", linear="first"),
    aten.diag.default: Rule(replicated, linear="all"),
    aten.diag_embed.default: Rule(diag_embed, linear="all"),
    aten.diagonal.default: Rule(diagonal, linear="all"),
    aten.diagonal_scatter.default: Rule(diagonal_scatter, linear="all"),
    aten.linalg_cholesky.default: Rule("... i! j! -> ... i! j!"),
    aten.linalg_householder_product.default: Rule("... i! j!, ... r! -> ... i! j!"),
    aten.linalg_lu_solve.default: Rule(factored, linear="2"),
    aten.linalg_solve.default: Rule(solve, linear="1"),
    aten.linalg_solve_triangular.default: Rule(triangular, linear="1"),
    aten.lu_unpack.default: Rule("... i! j!, ... r! -> ... x! y!, ... k! l!, ... m! n!"),
    aten.ormqr.default: Rule(reflected, linear="2"),
    aten.trace.default: Rule(replicated, linear="all"),
}
