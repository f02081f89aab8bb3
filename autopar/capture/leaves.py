"""The tensors among the arguments and the results of functions: asked for at every function that a model calls while it is traced, by every mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree

PLAIN = frozenset((bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.layout, type(None), type(...)))
"""What holds no tensors."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(item: Any, found: list[Tensor]) -> None:
    kind = type(item)
    if kind in PLAIN:
        return
    if isinstance(item, Tensor):
        found.append(item)
    elif kind is tuple or kind is list:
        for each in item:
            _collect(each, found)
    elif kind is dict:
        for each in item.values():
            _collect(each, found)
    else:
        found.extend(leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, Tensor))
