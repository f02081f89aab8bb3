"""A recognised layer of experts, in a form that does not depend on how the model wrote it, and the call of
`ops.experts` that replaces it. Used by experts and expert_loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.sink_flatten import flattened, merge

aten = torch.ops.aten

ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
"""Functions that make zeros."""
SPREAD = (aten.expand.default, aten.reshape.default, aten.to.dtype, aten.unsqueeze.default)
"""Operators that keep a tensor of zeros one."""


@dataclass(frozen=True)
class Layer:
    """The operands of `ops.experts`. `hidden [n, d]`, `chosen` and `gates [n, k]` are still flattened. `bias` is that
    of the second layer. It is added outside of `ops.experts`, because with experts cut by width each rank's result is a
    partial sum."""

    hidden: fx.Node
    chosen: fx.Node
    gates: fx.Node
    weights: tuple[fx.Node | str, ...]
    bias: fx.Node | None


def called(layer: Layer, like: fx.Node) -> fx.Node:
    """The layer as a call at the insertion point, with the dtype of `like` and its dims, of which those of tokens may
    be flattened."""
    tokens = _apart(layer.hidden, layer.chosen, layer.gates)
    new = edit.call(like, ops.experts, *tokens, *layer.weights)
    if layer.bias is not None:
        more = edit.call(like, ops.bag, layer.bias, *tokens[1:])
        new = edit.call(like, aten.add.Tensor, new, more)
    new = edit.cast(new, facts.dtype(like), like=like)
    return new if facts.rank(like) == facts.rank(new) else flat(new)


def put(node: fx.Node, new: fx.Node) -> None:
    """Replace `node` by `new` with flattened tokens; where the users of `node` unflatten it, both reshapes are
    removed."""
    users = list(node.users)
    edit.replace(node, new)
    for user in users:
        if user.target is aten.reshape.default:
            merge(user)


def _apart(*flat: fx.Node) -> tuple[fx.Node, ...]:
    """The operands before batch and sequence were merged, where these are merged in the same way in all of them."""
    found = [source for node in flat if (source := flattened(node)) is not None]
    alike = len(found) == len(flat) and len({facts.shape(source)[:-1] for source in found}) == 1
    return tuple(found) if alike else flat


def flat(node: fx.Node) -> fx.Node:
    """`node [..., d]` as `[n, d]`, at the insertion point."""
    return node if facts.rank(node) == 2 else edit.call(node, aten.reshape.default, node, [-1, edit.size(node, -1)])


def in_front(target: Any, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """`target(node, ...)` of flattened tokens `[n, d]`, at the insertion point. Where `node` is a flattening, the call
    is made on its operand and flattened after."""
    return flat(edit.call(node, target, flattened(node) or node, *args, **kwargs))


def uncast(node: Any) -> Any:
    """The operand of `node` where that is a cast; else `node`."""
    cast = edit.call_of(node, aten.to.dtype)
    return node if cast is None else cast.args[0]


def is_zeros(node: Any) -> bool:
    """Whether all elements of `node` are zeros of a factory function, reshaped or expanded."""
    while (source := edit.call_of(node, *SPREAD)) is not None:
        node = source.args[0]
    return edit.call_of(node, *ZEROS) is not None


def together(tensors: list[fx.Node], each: int, like: fx.Node) -> fx.Node:
    """The tensors stacked along a new first dim; with `each` > 1, groups of `each` are concatenated along the second.
    Where the tensors are all slices of one tensor, that one."""
    cuts = [cut for tensor in tensors if (cut := edit.call_of(tensor, aten.select.int)) is not None]
    if each == 1 and len(cuts) == len(tensors):
        whole: Any = cuts[0].args[0]
        if facts.shape(whole)[0] == len(cuts) and all(
            cut.args == (whole, 0, number) for number, cut in enumerate(cuts)
        ):
            return whole
    stacked = edit.call(like, aten.stack.default, tensors)
    if each == 1:
        return stacked
    sizes: list[Any] = [edit.size(stacked, dim) for dim in range(1, facts.rank(stacked))]
    return edit.call(like, aten.reshape.default, stacked, [len(tensors) // each, each * sizes[0], *sizes[1:]])
