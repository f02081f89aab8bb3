"""Removes operators without effect: asserts, casts to the same dtype, dropout that drops nothing, copies, whole slices.

`clone` and `contiguous` are the identity because ops are functional here, and because every `view` has become a
`reshape`, which needs no particular strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes import edit, facts, memory_order
from passes._torch import shape_check
from passes.grads import needs_grad

aten = torch.ops.aten

ASSERTS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    shape_check,
)
"""Checks of values and sizes, which are removed."""


def drop_what_gives_itself(gm: fx.GraphModule) -> None:
    """Remove calls that return their operand itself, not a copy or a view: in-place changes and gradients of one are
    those of the other."""
    for node in edit.calls(gm, *ITSELF):
        if ITSELF[node.target](node):
            edit.replace(node, node.args[0])  # type: ignore[arg-type]  # a tensor


def drop_noops(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: removes ops that give an operand unchanged, asserts, and calls that nothing uses.
    gives: the same values with fewer nodes. Where a removed copy changed the memory order, the strides of the values
           computed from it are inferred anew (memory_order)."""
    for node in edit.calls(gm, *ASSERTS):
        gm.graph.erase_node(node)
    moved: dict[fx.Node, None] = {}
    for node in edit.calls(gm):
        if node.target in IDENTITY and IDENTITY[node.target](node):
            operand = node.args[0]
            assert isinstance(operand, fx.Node)
            if memory_order.differ(node, operand):
                moved.update(dict.fromkeys(node.users))
            edit.replace(node, operand)
    for node in edit.calls(gm, aten.slice_scatter.default):
        if _writes_all(node):
            edit.replace(node, node.args[1])  # type: ignore[arg-type]  # a tensor, by the operator's schema
    for node in edit.calls(gm, aten.squeeze.dim):
        if (apart := edit.call_of(node.args[0], aten.unsqueeze.default)) is not None and _same_dim(node, apart):
            edit.replace(node, apart.args[0])  # type: ignore[arg-type]  # a tensor, by the operator's schema
    _drop_detach(gm)
    memory_order.follow(gm.graph, moved)
    return edit.finish(gm)


def _drop_detach(gm: fx.GraphModule) -> None:
    """Remove `detach` of values that have no gradient anyway."""
    carries = needs_grad(gm)
    for node in edit.calls(gm, aten.detach.default):
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        if not carries[operand]:
            edit.replace(node, operand)


def _always(node: fx.Node) -> bool:
    """Whether a call is without effect: always."""
    return True


def _same_dtype(node: fx.Node) -> bool:
    """Whether a cast is to the dtype of its operand."""
    return facts.dtype(node) == facts.dtype(node.args[0])  # type: ignore[arg-type]


def _same_shape(node: fx.Node) -> bool:
    """Whether the result has the sizes of the operand."""
    return facts.shape(node) == facts.shape(node.args[0])  # type: ignore[arg-type]


def drops_nothing(node: fx.Node) -> bool:
    """Whether a dropout returns its operand itself."""
    given = edit.args_of(node)
    return given["p"] == 0 or not given.get("train", given.get("training", True))


def _whole_slice(node: fx.Node) -> bool:
    """Whether a slice takes the whole dim."""
    return edit.args_of(node)["step"] == 1 and _same_shape(node)


def _writes_all(node: fx.Node) -> bool:
    """Whether a write replaces all of the tensor that it writes to."""
    source = node.args[1]
    assert isinstance(source, fx.Node)
    return facts.shape(source) == facts.shape(node) and facts.dtype(source) == facts.dtype(node)


def _same_dim(squeezed: fx.Node, apart: fx.Node) -> bool:
    """Whether `squeezed` removes the very dim that `apart` added."""
    rank = facts.rank(apart)
    return int(squeezed.args[1]) % rank == int(apart.args[1]) % rank  # type: ignore[arg-type]


def _swaps_nothing(node: fx.Node) -> bool:
    """Whether a transpose exchanges a dim with itself."""
    rank = facts.rank(node)
    return not rank or int(node.args[1]) % rank == int(node.args[2]) % rank  # type: ignore[arg-type]


def _permutes_nothing(node: fx.Node) -> bool:
    """Whether a permutation leaves all dims in place."""
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims] == list(range(len(dims)))


def _neutral(number: float) -> Callable[[fx.Node], bool]:
    """A function: whether the second operand of a call is this number, and the result is as the first operand."""

    def check(node: fx.Node) -> bool:
        other = node.args[1]
        is_number = isinstance(other, (int, float)) and other == number
        return is_number and _same_dtype(node) and _same_shape(node)

    return check


def _pads_nothing(node: fx.Node) -> bool:
    """Whether all amounts of padding are 0."""
    pads: Any = node.args[1]
    return all(isinstance(pad, int) and pad == 0 for pad in pads)


def copies(cast: fx.Node) -> bool:
    """Whether a cast makes a copy: to another dtype, or because it is asked to."""
    return bool(edit.args_of(cast).get("copy")) or not _same_dtype(cast)


def _as_it_was(node: fx.Node) -> bool:
    """Whether the result of `node` has the memory, sizes and dtype of its operand."""
    operand: Any = node.args[0]
    return facts.value(node).untyped_storage() is facts.value(operand).untyped_storage() and facts.kind(
        node
    ) == facts.kind(operand)


CASTS = (aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.type_as.default)
"""Operators that return their operand itself where nothing about it changes."""

DROPOUTS = (
    aten.alpha_dropout.default,
    aten.dropout.default,
    aten.feature_alpha_dropout.default,
    aten.feature_dropout.default,
)

ITSELF: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(CASTS, lambda cast: not copies(cast)),
    **dict.fromkeys(DROPOUTS, drops_nothing),
    **dict.fromkeys(
        (
            aten.atleast_1d.default,
            aten.atleast_2d.default,
            aten.atleast_3d.default,
            aten.conj_physical.default,
            aten.contiguous.default,
            aten.flatten.using_ints,
            aten.positive.default,
            aten.real.default,
            aten.resolve_conj.default,
            aten.resolve_neg.default,
            aten.to_dense.default,
        ),
        _as_it_was,
    ),
}
"""Operators that may return their operand itself, not a view or copy -> whether a call does."""

IDENTITY: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(DROPOUTS, drops_nothing),
    aten.add.Tensor: _neutral(0),
    aten.alias.default: _always,
    aten.clone.default: _always,
    aten.constant_pad_nd.default: _pads_nothing,
    aten.contiguous.default: _always,
    aten.div.Tensor: _neutral(1),
    aten.expand.default: _same_shape,
    aten.expand_as.default: _same_shape,
    aten.lift_fresh_copy.default: _always,
    aten.mul.Tensor: _neutral(1),
    aten.pad.default: _pads_nothing,
    aten.permute.default: _permutes_nothing,
    aten.repeat.default: _same_shape,
    aten.reshape.default: _same_shape,
    aten.slice.Tensor: _whole_slice,
    aten.sub.Tensor: _neutral(0),
    aten.to.dtype: _same_dtype,
    aten.transpose.int: _swaps_nothing,
}
"""Operators that may be without effect -> whether a call is."""
