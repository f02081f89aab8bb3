"""The tensors among the arguments and the results of functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autopar._torch import pytree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
