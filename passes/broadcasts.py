"""`broadcast_tensors` as one `expand` for each tensor that is smaller: each has a gradient of its own, or none."""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def broadcasts(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: broadcast_tensors becomes expands of those of its tensors that are smaller than the others make them.
    gives: no broadcast_tensors; a tensor that has the sizes already stays as it is (losses broadcast predictions to targets alike).
    """
    for node in edit.calls(gm, aten.broadcast_tensors.default):
        tensors = node.args[0]
        for user in list(node.users):
            with edit.before(user):
                edit.replace(user, _expanded(tensors[user.args[1]], tensors, user))  # type: ignore[index,arg-type]
        node.graph.erase_node(node)
    return edit.finish(gm)


def _expanded(tensor: fx.Node, among: list[fx.Node], like: fx.Node) -> fx.Node:
    """`tensor` at the sizes of `like`, which `among` have between them."""
    shape = facts.shape(like)
    if list(facts.shape(tensor)) == list(shape):
        return tensor
    return edit.call(like.graph, aten.expand.default, (tensor, [_size(among, dim - len(shape), size) for dim, size in enumerate(shape)]), like=like)


def _size(among: list[fx.Node], dim: int, size: object) -> int | fx.Node:
    """The size of `dim`, counted from the last: a number, or that of the tensor that has it."""
    if isinstance(size, int):
        return size
    owner = next(node for node in among if -dim <= len(facts.shape(node)) and facts.shape(node)[dim] == size)
    return edit.size(owner, len(facts.shape(owner)) + dim)
