"""Inverses of views: how the new value of a view is written back into the tensor that it is a view of. Used by
inplace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.drop_noops import CASTS

aten = torch.ops.aten


def _scattered(operator: Callable[..., Any]) -> Callable[[fx.Node, fx.Node, fx.Node], fx.Node]:
    """`operator`, applied to real and imaginary parts apart where numbers are complex: torch has no gradient of it for
    complex numbers."""

    def write(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
        if not facts.dtype(parent).is_complex:
            return edit.call(view, operator, parent, new, *view.args[1:])
        _, dim, *rest = edit.args_of(view).values()
        parts = [edit.call(view, aten.view_as_real.default, node) for node in (parent, new)]
        written = edit.call(view, operator, *parts, dim % facts.rank(parent), *rest)
        return edit.call(view, ops.as_complex, written)

    return write


def _diagonal(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
    """`parent` with its diagonal, of which `view` is the view, replaced by `new`; by real and imaginary parts as in
    `_scattered`."""
    given, rank, scatter = edit.args_of(view), facts.rank(parent), aten.diagonal_scatter.default
    where = (given["offset"], given["dim1"] % rank, given["dim2"] % rank)
    if not facts.dtype(parent).is_complex:
        return edit.call(view, scatter, parent, new, *where)
    whole, part = (edit.call(view, aten.view_as_real.default, node) for node in (parent, new))
    written = edit.call(view, scatter, whole, edit.call(view, aten.transpose.int, part, -1, -2), *where)
    return edit.call(view, ops.as_complex, written)


def _detached(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
    """The new value of a detached view, written back. It carries no gradient to uses of the parent."""
    return edit.call(view, aten.detach.default, new)


def _same_call(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
    """A view whose inverse is the same call on the new value (a transpose)."""
    return edit.call(view, view.target, new, *view.args[1:])


def _unview(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
    """A reshape back to the sizes of the parent."""
    sizes = [edit.size(parent, dim) for dim in range(facts.rank(parent))]
    return edit.call(view, aten.reshape.default, new, sizes)


def _permuted(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
    """The inverse permutation."""
    rank, dims = facts.rank(parent), edit.args_of(view)["dims"]
    places = [dim % rank for dim in dims]
    return edit.call(view, aten.permute.default, new, [places.index(dim) for dim in range(rank)])


def _identity(parent: fx.Node, new: fx.Node, view: fx.Node) -> fx.Node:
    """A view of all elements: the new value itself."""
    return new


SCATTERS: dict[Any, Callable[[fx.Node, fx.Node, fx.Node], fx.Node]] = {
    aten.alias.default: _identity,
    aten.detach.default: _detached,
    **dict.fromkeys(CASTS, _identity),
    aten.diagonal.default: _diagonal,
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.permute.default: _permuted,
    **dict.fromkeys(
        (
            aten.t.default,
            aten.transpose.int,
        ),
        _same_call,
    ),
    **dict.fromkeys(
        (
            aten.flatten.using_ints,
            aten.ravel.default,
            aten.reshape.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.view.default,
        ),
        _unview,
    ),
}
"""Views -> a function (parent, new value of the view, view) that gives the new value of the parent."""
