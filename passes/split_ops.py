"""Every cut of a tensor into parts along one dim as one `split_with_sizes`.

Fused projections (q, k, v side by side) are cut by split, chunk, unbind or by slices, and so are samples that were
joined (`h[:n], h[n:]` of chosen and rejected texts); one op makes one rule enough.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
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
_BY_SIZE = (aten.split.Tensor, aten.unsafe_split.Tensor)
"""Those that are given the size of a part."""


def split_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: chunk, split, unbind, and slices that together cover one dim, become split_with_sizes. Along a symbolic dim
           that is done where all parts are alike, and slices may leave some of them out.
    gives: cuts read by getitem; chunks along a symbolic dim, parts of it that differ, and slices that leave out some
           of a dim of known size, stay."""
    for node in edit.calls(gm, *_CUTS):
        _one_cut(node)
    for node in list(gm.graph.nodes):
        _cut_from_slices(node)
    return edit.finish(gm)


def _one_cut(node: fx.Node) -> None:
    """A split, chunk or unbind as one `split_with_sizes`; None (it stays) along a symbolic dim, but for a split into
    equal parts."""
    given = edit.args_of(node)
    operand = given["self"]
    rank = facts.rank(operand)
    dim = given["dim"] % rank
    unbound = node.target is aten.unbind.int
    sizes: list[Any] = [1 if unbound else facts.shape(node, i)[dim] for i in range(len(facts.tensors(node)))]
    if sum(sizes) != facts.shape(operand)[dim]:
        return  # indices that do not grow leave something out, or give it twice
    if not all(isinstance(size, int) for size in sizes):
        if node.target not in _BY_SIZE or len(set(sizes)) > 1:
            return
        sizes = [given["split_size"]] * len(sizes)
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
        found = _static(node, dim, total) if isinstance(total, int) else _alike(node, dim, total)
        if found is None:
            continue
        spans, sizes = found
        first = min(spans)
        with edit.before(first):
            cut = edit.call(first, aten.split_with_sizes.default, node, sizes, dim)
        for piece, span in spans.items():
            with edit.before(piece):
                parts = [edit.call(piece, operator.getitem, cut, number) for number in span]
                edit.replace(piece, parts[0] if len(parts) == 1 else edit.call(piece, aten.cat.default, parts, dim))


def _static(node: fx.Node, dim: int, total: int) -> tuple[dict[fx.Node, range], list[Any]] | None:
    """The slices of `node` that partition its dim `dim` of `total` elements, each with the numbers of its parts, and
    the sizes of the parts; None where they do not."""
    ranges = {
        piece: (_clamped(start, total), _clamped(end, total))
        for piece, (start, end) in _ranges(node, dim).items()
        if isinstance(start, int) and isinstance(end, int)
    }
    bounds = sorted(set(ranges.values()))
    ends = [end for _start, end in bounds]
    if len(bounds) < 2 or [start for start, _end in bounds] != [0, *ends[:-1]] or ends[-1] != total:
        return None
    spans = {piece: range(number := bounds.index(span), number + 1) for piece, span in ranges.items()}
    return spans, [end - start for start, end in bounds]


def _alike(node: fx.Node, dim: int, total: sympy.Expr) -> tuple[dict[fx.Node, range], list[Any]] | None:
    """The same for a symbolic dim, where all parts have the same size, which the first slice names; a slice may be
    several of them, and parts may be left out (`logits[:n]`, of chosen texts alone)."""
    given = _ranges(node, dim)
    ranges = {piece: [_size(bound, total, node) for bound in span] for piece, span in given.items()}
    if not ranges:
        return None
    for named, each in zip(given[min(ranges)], ranges[min(ranges)], strict=True):
        if not isinstance(named, fx.Node) or not (many := sympy.cancel(total / each)).is_Integer or many < 2:
            continue
        spans = {piece: [sympy.cancel(bound / each) for bound in span] for piece, span in ranges.items()}
        if all(bound.is_Integer for span in spans.values() for bound in span):
            found = {piece: range(*map(int, span)) for piece, span in spans.items()}
            within = all(span and span.start >= 0 and span.stop <= many for span in found.values())
            return (found, [named] * int(many)) if within else None
    return None


def _size(bound: Any, total: sympy.Expr, node: fx.Node) -> facts.Size:
    """A bound of a slice of a symbolic dim of `node` as a size."""
    if isinstance(bound, fx.Node):
        return facts.as_size(bound.meta["val"], node.graph.owning_module)
    return total if bound == INT64_MAX else bound


def _ranges(node: fx.Node, dim: int) -> dict[fx.Node, tuple[Any, Any]]:
    """Start and end, as they are given, of each slice of `node` along `dim`."""
    found = {}
    for user in node.users:
        if user.target is not aten.slice.Tensor or user.args[0] is not node:
            continue
        given = edit.args_of(user)
        if given["dim"] % facts.rank(node) == dim and given["step"] == 1:
            found[user] = (given["start"] or 0, INT64_MAX if given["end"] is None else given["end"])
    return found


def _clamped(bound: Any, total: int) -> int:
    """A bound of a slice as a number from 0 to `total`."""
    return int(min(max(bound + total if bound < 0 else bound, 0), total))
