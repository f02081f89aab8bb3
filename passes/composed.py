"""Operators written as the common operators that torch computes them with, so that the rules of these apply."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.covariance import COVARIANCES
from passes.fake_quantize import FAKE_QUANTIZED
from passes.spellings import reshape_sizes

aten = torch.ops.aten


def composed(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops with values.
    does: replaces the operators of the table below by the common ones that they consist of.
    gives: the same values; grids of images no longer have the number of samples among their arguments."""
    return edit.rewrite(gm, COMPOSED)


def _line(operand: fx.Node, like: fx.Node) -> fx.Node:
    """All elements of a tensor in one dim."""
    return edit.call(like, aten.reshape.default, operand, [-1])


def _wide(operand: fx.Node, other: fx.Node, dim: int, like: fx.Node) -> fx.Node:
    """`operand` expanded to the sizes of `other` in all dims but `dim`."""
    pairs = list(zip(facts.shape(operand), facts.shape(other), strict=True))
    new = [number for number, (own, wanted) in enumerate(pairs) if number != dim and own == 1 and wanted != 1]
    if not new:
        return operand
    sizes = [edit.size(other, number) if number in new else -1 for number in range(len(pairs))]
    return edit.call(like, aten.expand.default, operand, sizes)


def _along(node: fx.Node) -> fx.Node:
    """take_along_dim as `gather` of broadcast operands; without a dim, of the flattened ones."""
    given = edit.args_of(node)
    operand, indices, dim = given["self"], given["indices"], given["dim"]
    if dim is None:
        operand, indices, dim = _line(operand, node), _line(indices, node), 0
    dim %= facts.rank(operand)
    chosen = _wide(operand, indices, dim, node), dim, _wide(indices, operand, dim, node)
    return edit.call(node, aten.gather.default, *chosen)


def _taken(node: fx.Node) -> fx.Node:
    """torch.take: elements by their position in the flattened tensor."""
    return edit.call(node, aten.index.Tensor, _line(edit.args_of(node)["self"], node), [edit.args_of(node)["index"]])


def _rotated(node: fx.Node) -> fx.Node:
    """torch.rot90: a half turn flips both dims; a quarter turn flips one and exchanges both."""
    given = edit.args_of(node)
    operand, (first, second), quarters = given["self"], given["dims"], given["k"] % 4
    reversed_dims: list[int] = [[], [second], [first, second], [first]][quarters]
    if reversed_dims:
        operand = edit.call(node, aten.flip.default, operand, reversed_dims)
    return edit.call(node, aten.transpose.int, operand, first, second) if quarters % 2 else operand


def _diagonal_blocks(node: fx.Node) -> fx.Node | None:
    """block_diag: each matrix padded by zeros on the left and right, all concatenated along the rows."""
    matrices: Sequence[fx.Node] = edit.args_of(node)["tensors"]
    total, before, rows = facts.shape(node)[1], 0, []
    sizes = [(facts.shape(each) or (1,))[-1] for each in matrices]
    if not all(isinstance(size, int) for size in sizes):
        return None
    for each, size in zip(matrices, sizes, strict=True):
        if facts.rank(each) < 2:
            each = edit.call(node, aten.reshape.default, each, [1, size])
        each = edit.cast(each, facts.dtype(node), like=node)
        rows.append(edit.call(node, aten.constant_pad_nd.default, each, [before, total - before - size]))
        before += size
    return edit.call(node, aten.cat.default, rows, 0)


def _meshed(node: fx.Node) -> None:
    """meshgrid: vector i is expanded along the dims of the others; with `indexing` "xy" the first two dims are
    exchanged."""
    given = edit.args_of(node)
    vectors = [_line(each, node) for each in given["tensors"]]
    order = list(range(len(vectors)))
    if given.get("indexing", "ij") == "xy" and len(vectors) > 1:
        order[:2] = [1, 0]
    sizes = [edit.size(vectors[number], 0) for number in order]
    for user in list(node.users):
        number = user.args[1]
        assert user.target is operator.getitem and isinstance(number, int)
        alone = [-1 if dim == order.index(number) else 1 for dim in range(len(order))]
        with edit.before(user):
            dim = edit.call(user, aten.reshape.default, vectors[number], alone)
            edit.replace(user, edit.call(user, aten.expand.default, dim, sizes))


def _distance(node: fx.Node) -> fx.Node:
    """torch.dist: the norm of the difference."""
    given = edit.args_of(node)
    difference = edit.call(node, aten.sub.Tensor, given["self"], given["other"])
    return edit.call(node, aten.linalg_vector_norm.default, difference, given["p"])


def _inner(node: fx.Node) -> fx.Node | None:
    """linalg.vecdot: products summed along a dim; for real numbers only (no conjugation)."""
    given = edit.args_of(node)
    if facts.dtype(node).is_complex:
        return None
    product = edit.call(node, aten.mul.Tensor, given["x"], given["y"])
    return edit.call(node, aten.sum.dim_IntList, product, [given["dim"]])


def _sorted(node: fx.Node) -> fx.Node:
    """msort: the values of `sort` along the first dim."""
    both = edit.call(node, aten.sort.default, edit.args_of(node)["self"], 0)
    return edit.call(node, operator.getitem, both, 0)


def _diagonal(node: fx.Node) -> fx.Node:
    """diagflat: a matrix with all elements of the operand on a diagonal."""
    given = edit.args_of(node)
    return edit.call(node, aten.diag_embed.default, _line(given["self"], node), given["offset"])


def _its_diagonal(node: fx.Node) -> fx.Node:
    """linalg.diagonal: `diagonal` of the two given dims, by default the last two."""
    given = edit.args_of(node)
    return edit.call(node, aten.diagonal.default, given["A"], given["offset"], given["dim1"], given["dim2"])


def _grid(node: fx.Node) -> fx.Node | None:
    """affine_grid: the coordinates of pixels times each sample's matrix. None (the call stays) where height or width is
    symbolic."""
    given = edit.args_of(node)
    theta, sizes, call = given["theta"], given["size"][2:], partial(edit.call, node)
    if not all(isinstance(size, int) for size in sizes):
        return None
    alone = [[size if dim == own else 1 for dim in range(len(sizes))] for own, size in enumerate(sizes)]
    lines = [
        call(aten.reshape.default, _places(size, given["align_corners"], node), shape)
        for size, shape in zip(sizes, alone, strict=True)
    ]
    places = [call(aten.expand.default, line, list(sizes)) for line in reversed(lines)]
    ones = call(aten.ones.default, list(sizes), dtype=facts.dtype(node))
    rows = call(aten.reshape.default, call(aten.stack.default, [*places, ones], -1), [-1, len(sizes) + 1])
    product = call(aten.matmul.default, rows, call(aten.transpose.int, theta, 1, 2))
    return call(aten.reshape.default, product, reshape_sizes(product, node))


def _places(size: int, corners: bool, node: fx.Node) -> fx.Node:
    """The coordinates of `size` pixels on a line from -1 to 1: with the first and last pixel at the ends (`corners`),
    else the centres of `size` equal intervals."""
    dtype = {"dtype": facts.dtype(node)}
    if size == 1:
        return edit.call(node, aten.zeros.default, [1], **dtype)
    end = 1.0 if corners else (size - 1) / size
    return edit.call(node, aten.linspace.default, -end, end, size, **dtype)


COMPOSED: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.affine_grid_generator.default: _grid,
    aten.block_diag.default: _diagonal_blocks,
    aten.diagflat.default: _diagonal,
    aten.dist.default: _distance,
    aten.linalg_diagonal.default: _its_diagonal,
    aten.linalg_vecdot.default: _inner,
    aten.meshgrid.default: _meshed,
    aten.meshgrid.indexing: _meshed,
    aten.msort.default: _sorted,
    aten.rot90.default: _rotated,
    aten.take.default: _taken,
    aten.take_along_dim.default: _along,
    **COVARIANCES,
    **FAKE_QUANTIZED,
}
"""Operators -> a function that writes a call with the common operators that it consists of; None: the call stays."""
