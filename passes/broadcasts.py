"""`broadcast_tensors` as one `expand` for each smaller tensor, so that each has its own gradient, or none.

And slices of an expanded dim are taken from the tensor before it was expanded (the first sample of prompts that are the
same for all samples): otherwise a slice would need the whole dim on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def broadcasts(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops; casts to the dtype that an operand has already are removed.
    does: replaces broadcast_tensors by an expand of each tensor that is smaller than the common sizes, and slices of
           expanded dims by expands to fewer elements.
    gives: no broadcast_tensors. A tensor that has the common sizes already stays as it is (losses broadcast predictions
           to targets of the same sizes)."""
    for node in edit.calls(gm, aten.broadcast_tensors.default):
        tensors = node.args[0]
        for user in list(node.users):
            with edit.before(user):
                edit.replace(user, _expanded(tensors[user.args[1]], tensors, user))  # type: ignore[index,arg-type]
        node.graph.erase_node(node)
    return edit.rewrite(gm, {aten.slice.Tensor: _part})


def _part(node: fx.Node) -> fx.Node | None:
    """A slice of a dim that was expanded from size 1, as an expansion to fewer elements; None for any other slice."""
    whole: Any = node.args[0]
    if whole.target is not aten.expand.default:
        return None
    x, asked = edit.args_of(whole)["self"], edit.args_of(whole)["size"]
    rank, shape = facts.rank(whole), facts.shape(node)
    dim = edit.args_of(node)["dim"] % rank
    own = dim - rank + facts.rank(x)
    if own < 0 or facts.shape(x)[own] != 1 or facts.shape(whole)[dim] == 1 or not isinstance(shape[dim], int):
        return None
    if facts.shape(x) == shape:
        return x
    return edit.call(node, aten.expand.default, x, [shape[dim] if i == dim else size for i, size in enumerate(asked)])


def _expanded(tensor: fx.Node, among: list[fx.Node], like: fx.Node) -> fx.Node:
    """`tensor` expanded to the sizes of `like`. `among` are the broadcast tensors, from which symbolic sizes are
    read."""
    shape = facts.shape(like)
    if list(facts.shape(tensor)) == list(shape):
        return tensor
    return edit.call(
        like, aten.expand.default, tensor, [_size(among, dim - len(shape), size) for dim, size in enumerate(shape)]
    )


def _size(among: list[fx.Node], dim: int, size: object) -> int | fx.Node:
    """The `size` of a dim of the result, counted from the last: a number, or a node that reads it from the tensor in
    `among` that has it."""
    if isinstance(size, int):
        return size
    owner = next(node for node in among if -dim <= facts.rank(node) and facts.shape(node)[dim] == size)
    return edit.size(owner, facts.rank(owner) + dim)
