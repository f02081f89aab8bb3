"""Recognises RMSNorm written with elementary operators, and replaces it by torch's: one kernel for six, and less memory
kept for the backward.

    x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)          # also x * x; 1 / sqrt, division by sqrt, ** -0.5
    (...x.to(float32)...).to(x.dtype)                         # with all of it in a wider dtype
    weight * (...)                                            # of the last dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

SQUARES: dict[Any, Callable[..., bool]] = {
    aten.mul.Tensor: lambda one, other: one is other,
    aten.pow.Tensor_Scalar: lambda base, by: by == 2,
    aten.square.default: lambda base: True,
}
"""Operators that square their first operand -> whether a call does, by its operands."""

COMPUTED = 32
"""The least number of bits in which `rms_norm` computes."""


def norms(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: every cast spelled `to`; means not yet written as sums.
    does: finds rows of static width that are divided by the root of the mean of their squares, with casts around that
           and a weight after it.
    gives: `rms_norm`, which computes in float32 where rows have fewer bits. With a weight the result is rounded once,
           also where the model rounds before it multiplies by the weight."""
    for node in edit.calls(gm, aten.mul.Tensor, aten.div.Tensor):
        found = _norm(node)
        if found is not None:
            _replace(found)
    return edit.finish(gm)


@dataclass(frozen=True)
class _Norm:
    """A recognised RMSNorm without weight: `node` is `rows / sqrt(mean(rows ** 2, -1) + eps)`."""

    node: fx.Node
    rows: fx.Node
    eps: float


def _norm(node: fx.Node) -> _Norm | None:
    """The RMSNorm that `node` is the last operator of; None for other nodes."""
    for rows, root, inverse in _quotients(node):
        squares = _inside(root, inverse)
        if squares is not None:
            mean, eps = squares
            wide = _squared(_mean_of_last(mean))
            if (
                wide is not None
                and rows in (wide, _source(wide))
                and facts.kind(node) == facts.kind(wide)
                and isinstance(facts.shape(wide)[-1], int)
                and _bits(wide)
            ):
                return _Norm(node, wide, eps)
    return None


def _quotients(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """The candidates (rows, root, whether `root` is already the reciprocal) of a product or quotient."""
    left, right = node.args[0], node.args[1]
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return
    if node.target is aten.div.Tensor:
        yield left, right, False
    else:
        yield left, right, True
        yield right, left, True


def _inside(root: fx.Node, inverse: bool) -> tuple[Any, float] | None:
    """m and eps where `root` is sqrt(m + eps), or its reciprocal; None for other nodes."""
    if inverse and edit.call_of(root, aten.reciprocal.default) is not None:
        root, inverse = root.args[0], False  # type: ignore[assignment]  # what is inverted
    power = edit.call_of(root, aten.pow.Tensor_Scalar)
    plain = edit.call_of(root, aten.rsqrt.default if inverse else aten.sqrt.default)
    total = (
        plain.args[0]
        if plain is not None
        else power.args[0]
        if power is not None and power.args[1] == (-0.5 if inverse else 0.5)
        else None
    )
    added = edit.call_of(total, aten.add.Tensor, aten.add.Scalar)
    if added is None or not isinstance(added.args[1], (int, float)) or edit.args_of(added)["alpha"] != 1:
        return None
    return added.args[0], float(added.args[1])


def _mean_of_last(node: Any) -> Any:
    """The operand where `node` is its mean over the last dim, kept as size 1; None for other nodes."""
    mean = edit.call_of(node, aten.mean.dim)
    if mean is None:
        return None
    given = edit.args_of(mean)
    rank = facts.rank(given["self"])
    kept = rank > 0 and given["keepdim"] and facts.dtype(mean) == facts.dtype(given["self"])
    return given["self"] if kept and [dim % rank for dim in given["dim"] or ()] == [rank - 1] else None


def _squared(node: Any) -> fx.Node | None:
    """The operand where `node` is its square; None for other nodes."""
    one = edit.call_of(node, *SQUARES)
    return one.args[0] if one is not None and SQUARES[one.target](*one.args) else None  # type: ignore[return-value]  # a tensor


def _source(node: fx.Node) -> fx.Node:
    """The operand of `node` where that is a cast to a wider dtype; else `node`."""
    cast = edit.call_of(node, aten.to.dtype)
    if cast is None:
        return node
    operand: fx.Node = cast.args[0]  # type: ignore[assignment]  # what is cast
    return operand if 0 < _bits(operand) <= _bits(node) else node


def _bits(node: fx.Node) -> int:
    """Bits per element of a real floating dtype; 0 for others."""
    dtype = facts.dtype(node)
    return torch.finfo(dtype).bits if dtype.is_floating_point else 0


def _replace(found: _Norm) -> None:
    """Replace the norm by one operator, with the weight if it is multiplied next. Where the result is cast back to the
    dtype before the casts, and the norm was computed in at least its bits, the operator takes the uncast rows."""
    rows, last = found.rows, found.node
    cast, source = _only_user(last, aten.to.dtype), _source(rows)
    if (
        source is not rows
        and cast is not None
        and facts.dtype(cast) == facts.dtype(source)
        and max(_bits(source), COMPUTED) >= _bits(rows)
    ):
        rows, last = source, cast
    product = _only_user(last, aten.mul.Tensor)
    weight = next((arg for arg in product.args if arg is not last), None) if product is not None else None
    weighted = (
        isinstance(weight, fx.Node)
        and facts.shape(weight) == facts.shape(rows)[-1:]
        and facts.dtype(weight) == facts.dtype(rows)
    )
    last = product if weighted and product is not None else last
    width = facts.shape(rows)[-1]
    with edit.before(last):
        new = edit.call(found.node, aten.rms_norm.default, rows, [width], weight if weighted else None, found.eps)
    edit.replace(last, new)


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    """The only user of `node`, where that is a call of `target`; else None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None
