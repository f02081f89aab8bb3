"""Products that torch has under other names, written as matmuls and einsums, which have rules and FLOP formulas.

tensordot(x, w, 2)               einsum("abcd,cde->abe", x, w)
linalg.multi_dot([x, u, v])      (x @ u) @ v, or x @ (u @ v) where that takes fewer FLOPs
bilinear(x, y, w, b)             einsum("...aj,...j->...a", einsum("...i,aij->...aj", x, w), y) + b"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from string import ascii_letters
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.matmul import added, scaled

aten = torch.ops.aten


def products(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: writes tensordot, inner, addbmm and bilinear as einsums, and products of several matrices as matmuls in the
           order that takes the fewest FLOPs.
    gives: the same values, up to rounding, in operators that have rules and prices."""
    return edit.rewrite(gm, PRODUCTS)


def _einsum(node: fx.Node, equation: str, *operands: fx.Node) -> fx.Node:
    """An einsum of `operands`, at the insertion point."""
    return edit.call(node, aten.einsum.default, equation, list(operands))


def _summed(node: fx.Node, left: fx.Node, right: fx.Node, pairs: Sequence[tuple[int, int]]) -> fx.Node:
    """Multiply `left` and `right` and sum over the pairs of dims (of `left`, of `right`) in `pairs`. The dims of the
    result are the others of `left`, then the others of `right`."""
    ranks = [facts.rank(operand) for operand in (left, right)]
    one, other = ascii_letters[: ranks[0]], list(ascii_letters[ranks[0] : sum(ranks)])
    for first, second in pairs:
        other[second % ranks[1]] = one[first % ranks[0]]
    out = [letter for letter in (*one, *other) if (letter in one) != (letter in other)]
    return _einsum(node, f"{one},{''.join(other)}->{''.join(out)}", left, right)


def _tensordot(node: fx.Node) -> fx.Node:
    """torch.tensordot: a sum over pairs of dims."""
    given = edit.args_of(node)
    return _summed(node, given["self"], given["other"], list(zip(given["dims_self"], given["dims_other"], strict=True)))


def _inner(node: fx.Node) -> fx.Node:
    """torch.inner: a sum over the last dims of both; a scalar operand multiplies the other."""
    left, right = edit.tensor_operands(node)
    if not (facts.shape(left) and facts.shape(right)):
        return edit.call(node, aten.mul.Tensor, left, right)
    return _summed(node, left, right, [(-1, -1)])


def _addbmm(node: fx.Node) -> fx.Node:
    """The sum over a batch of matrix products, added to a matrix."""
    given = edit.args_of(node)
    product = _einsum(node, "bmk,bkn->mn", given["batch1"], given["batch2"])
    return added(node, scaled(node, product, given["alpha"]), given["self"], given["beta"])


def _bilinear(node: fx.Node) -> fx.Node:
    """torch bilinear. The weight is multiplied by the wider input first, so that the intermediate result is the smaller
    one."""
    given = edit.args_of(node)
    first, second, weight = given["input1"], given["input2"], given["weight"]
    _, rows, columns = (facts.example(node, size) for size in facts.value(weight).shape)
    if rows < columns:
        between = _einsum(node, "...j,aij->...ai", second, weight)
        product = _einsum(node, "...ai,...i->...a", between, first)
    else:
        between = _einsum(node, "...i,aij->...aj", first, weight)
        product = _einsum(node, "...aj,...j->...a", between, second)
    return product if given["bias"] is None else added(node, product, given["bias"])


def _chain(node: fx.Node) -> fx.Node:
    """linalg.multi_dot: a product of matrices, the first and the last of which may be vectors."""
    factors = edit.tensor_operands(node)
    sizes = [[facts.example(node, size) for size in facts.value(factor).shape] for factor in factors]
    bounds = (
        1 if len(sizes[0]) == 1 else sizes[0][0],
        *(size[0] for size in sizes[1:]),
        1 if len(sizes[-1]) == 1 else sizes[-1][1],
    )

    def multiplied(first: int, stop: int) -> fx.Node:
        if stop - first == 1:
            return factors[first]
        _, middle = least(bounds, first, stop)
        return edit.call(node, aten.matmul.default, multiplied(first, middle), multiplied(middle, stop))

    return multiplied(0, len(factors))


@cache
def least(bounds: tuple[int, ...], first: int, stop: int) -> tuple[int, int]:
    """The fewest scalar multiplications to multiply matrices `first` to `stop` - 1, where matrix i is `bounds[i]` x
    `bounds[i + 1]`; and the number of the first matrix of the last product's right operand."""
    if stop - first == 1:
        return 0, stop
    return min(
        (
            least(bounds, first, middle)[0]
            + least(bounds, middle, stop)[0]
            + bounds[first] * bounds[middle] * bounds[stop],
            middle,
        )
        for middle in range(first + 1, stop)
    )


PRODUCTS: dict[Any, Callable[[fx.Node], fx.Node]] = {
    aten.addbmm.default: _addbmm,
    aten.bilinear.default: _bilinear,
    aten.chain_matmul.default: _chain,
    aten.inner.default: _inner,
    aten.linalg_multi_dot.default: _chain,
    aten.tensordot.default: _tensordot,
}
"""Products under other names -> a function that writes a call with einsums and matmuls."""
