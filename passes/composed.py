"""Operators written as the common operators that torch computes them with, so that the rules of these apply."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
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
    return edit.call(like.graph, aten.reshape.default, (operand, [-1]), like=like)


def _wide(operand: fx.Node, other: fx.Node, dim: int, like: fx.Node) -> fx.Node:
    """`operand` expanded to the sizes of `other` in all dims but `dim`."""
    pairs = list(zip(facts.shape(operand), facts.shape(other), strict=True))
    new = [number for number, (own, wanted) in enumerate(pairs) if number != dim and own == 1 and wanted != 1]
    if not new:
        return operand
    sizes = [edit.size(other, number) if number in new else -1 for number in range(len(pairs))]
    return edit.call(like.graph, aten.expand.default, (operand, sizes), like=like)


def _along(node: fx.Node) -> fx.Node:
    """take_along_dim as `gather` of broadcast operands; without a dim, of the flattened ones."""
    given = edit.args_of(node)
    operand, indices, dim = given["self"], given["indices"], given["dim"]
    if dim is None:
        operand, indices, dim = _line(operand, node), _line(indices, node), 0
    dim %= facts.rank(operand)
    chosen = _wide(operand, indices, dim, node), dim, _wide(indices, operand, dim, node)
    return edit.call(node.graph, aten.gather.default, chosen, like=node)


def _taken(node: fx.Node) -> fx.Node:
    """torch.take: elements by their position in the flattened tensor."""
    return edit.call(
        node.graph,
        aten.index.Tensor,
        (_line(edit.args_of(node)["self"], node), [edit.args_of(node)["index"]]),
        like=node,
    )


def _rotated(node: fx.Node) -> fx.Node:
    """torch.rot90: a half turn flips both dims; a quarter turn flips one and exchanges both."""
    given = edit.args_of(node)
    operand, (first, second), quarters = given["self"], given["dims"], given["k"] % 4
    reversed_dims: list[int] = [[], [second], [first, second], [first]][quarters]
    if reversed_dims:
        operand = edit.call(node.graph, aten.flip.default, (operand, reversed_dims), like=node)
    return edit.call(node.graph, aten.transpose.int, (operand, first, second), like=node) if quarters % 2 else operand


def _diagonal_blocks(node: fx.Node) -> fx.Node | None:
    """block_diag: each matrix padded by zeros on the left and right, all concatenated along the rows."""
    matrices: Sequence[fx.Node] = edit.args_of(node)["tensors"]
    total, before, rows = facts.shape(node)[1], 0, []
    sizes = [(facts.shape(each) or (1,))[-1] for each in matrices]
    if not all(isinstance(size, int) for size in sizes):
        return None
    for each, size in zip(matrices, sizes, strict=True):
        if facts.rank(each) < 2:
            each = edit.call(node.graph, aten.reshape.default, (each, [1, size]), like=node)
        each = edit.cast(each, facts.dtype(node), like=node)
        rows.append(
            edit.call(node.graph, aten.constant_pad_nd.default, (each, [before, total - before - size]), like=node)
        )
        before += size
    return edit.call(node.graph, aten.cat.default, (rows, 0), like=node)


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
            dim = edit.call(node.graph, aten.reshape.default, (vectors[number], alone), like=user)
            edit.replace(user, edit.call(node.graph, aten.expand.default, (dim, sizes), like=user))


def _distance(node: fx.Node) -> fx.Node:
    """torch.dist: the norm of the difference."""
    given = edit.args_of(node)
    difference = edit.call(node.graph, aten.sub.Tensor, (given["self"], given["other"]), like=node)
    return edit.call(node.graph, aten.linalg_vector_norm.default, (difference, given["p"]), like=node)


def _inner(node: fx.Node) -> fx.Node | None:
    """linalg.vecdot: products summed along a dim; for real numbers only (no conjugation)."""
    given = edit.args_of(node)
    if facts.dtype(node).is_complex:
        return None
    product = edit.call(node.graph, aten.mul.Tensor, (given["x"], given["y"]), like=node)
    return edit.call(node.graph, aten.sum.dim_IntList, (product, [given["dim"]]), like=node)


def _sorted(node: fx.Node) -> fx.Node:
    """msort: the values of `sort` along the first dim."""
    both = edit.call(node.graph, aten.sort.default, (edit.args_of(node)["self"], 0), like=node)
    return edit.call(node.graph, operator.getitem, (both, 0), like=node)


def _diagonal(node: fx.Node) -> fx.Node:
    """diagflat: a matrix with all elements of the operand on a diagonal."""
    given = edit.args_of(node)
    return edit.call(node.graph, aten.diag_embed.default, (_line(given["self"], node), given["offset"]), like=node)


def _its_diagonal(node: fx.Node) -> fx.Node:
    """linalg.diagonal: `diagonal` of the two given dims, by default the last two."""
    given = edit.args_of(node)
    return edit.call(
        node.graph, aten.diagonal.default, (given["A"], given["offset"], given["dim1"], given["dim2"]), like=node
    )


def _grid(node: fx.Node) -> fx.Node | None:
    """affine_grid: the coordinates of pixels times each sample's matrix. None (the call stays) where height or width is
    symbolic."""
    given = edit.args_of(node)
    theta, sizes, call = given["theta"], given["size"][2:], edit.caller(node)
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
        return edit.call(node.graph, aten.zeros.default, ([1],), dtype, like=node)
    end = 1.0 if corners else (size - 1) / size
    return edit.call(node.graph, aten.linspace.default, (-end, end, size), dtype, like=node)


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
