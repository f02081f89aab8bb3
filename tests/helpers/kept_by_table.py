"""What the passes say that the backward of one call keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from autopar._torch import pytree
from passes.annotate_memory import saved_by
from passes.saved import Saved


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def kept_by_table(target: Any, args: Any, kwargs: Any, made: Any) -> Saved:
    """Of the call that made `made`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    graph = fx.Graph()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = graph.placeholder(f"x{place}")
            leaves[place].meta["val"] = leaf.detach()
    given, named = pytree.tree_unflatten(leaves, spec)
    node = graph.call_function(target, tuple(given), named)
    node.meta["val"] = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, made)
    return saved_by(node, [x.requires_grad for x in tensors((args, kwargs))])
