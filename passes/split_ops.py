"""Every cut of a tensor into parts along one dim as one `split_with_sizes`.

Fused projections (q, k, v side by side) are cut by split, chunk, unbind or by slices; one op makes one rule enough.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

INT64_MAX = 2**63 - 1
_CUTS = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.tensor_split.indices,
    aten.tensor_split.sections,
    aten.unbind.int,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
"""Operators that cut one dim into parts."""


def split_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: chunk, split, unbind, and slices that together cover one dim of static size, become split_with_sizes.
    gives: cuts read by getitem; those along a symbolic dim, and slices that leave something out, stay."""
    for node in edit.calls(gm, *_CUTS):
        _one_cut(node)
    for node in list(gm.graph.nodes):
        _cut_from_slices(node)
    return edit.finish(gm)


def _one_cut(node: fx.Node) -> None:
    """A split, chunk or unbind as one `split_with_sizes`; None (it stays) along a symbolic dim."""
    given = edit.args_of(node)
    operand = given["self"]
    rank = facts.rank(operand)
    dim = given["dim"] % rank
    unbound = node.target is aten.unbind.int
    sizes = [1 if unbound else part.shape[dim] for part in facts.tensors(node)]
    if not all(isinstance(size, int) for size in sizes) or sum(sizes) != facts.shape(operand)[dim]:
        return  # indices that do not grow leave something out, or give it twice
    with edit.before(node):
        cut = edit.call(node, aten.split_with_sizes.default, operand, sizes, dim)
    if not unbound:
        edit.replace(node, cut)
        return
    for user in list(node.users):
        with edit.before(user):
            part = edit.call(user, operator.getitem, cut, user.args[1])
            edit.replace(user, edit.call(user, aten.squeeze.dim, part, dim))
    node.graph.erase_node(node)


def _cut_from_slices(node: fx.Node) -> None:
    """Replaces the slices of `node` along a dim that partition it."""
    if not facts.is_tensor(node):
        return
    for dim, total in enumerate(facts.shape(node)):
        ranges = _ranges(node, dim, total) if isinstance(total, int) else {}
        bounds = sorted(set(ranges.values()))
        ends = [end for _start, end in bounds]
        if len(bounds) < 2 or [start for start, _end in bounds] != [0, *ends[:-1]] or ends[-1] != total:
            continue
        first = min(ranges)
        with edit.before(first):
            sizes = [end - start for start, end in bounds]
            cut = edit.call(first, aten.split_with_sizes.default, node, sizes, dim)
        for piece, span in ranges.items():
            with edit.before(piece):
                edit.replace(piece, edit.call(piece, operator.getitem, cut, bounds.index(span)))


def _ranges(node: fx.Node, dim: int, total: int) -> dict[fx.Node, tuple[int, int]]:
    """Start and end of each slice of `node` along `dim` whose bounds are numbers."""
    found = {}
    for user in node.users:
        if user.target is not aten.slice.Tensor or user.args[0] is not node:
            continue
        given = edit.args_of(user)
        start, end = given["start"] or 0, INT64_MAX if given["end"] is None else given["end"]
        same_dim = given["dim"] % facts.rank(node) == dim
        if same_dim and given["step"] == 1 and isinstance(start, int) and isinstance(end, int):
            found[user] = (_clamped(start, total), _clamped(end, total))
    return found


def _clamped(bound: Any, total: int) -> int:
    """A bound of a slice as a number from 0 to `total`."""
    return int(min(max(bound + total if bound < 0 else bound, 0), total))
