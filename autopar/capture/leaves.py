"""The tensors in pytrees of arguments and results, and dataclasses in these. Used by all modules that follow the values
of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree

LEAVES = {bool, int, float, str, type(None), torch.dtype, torch.device}
"""Types of most leaves that are no tensors."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, as torch gives them, which asks every item for much more than its type: this is called for
    every operator of a run."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            _collect(item, found)
    elif kind is dict:
        for item in tree.values():
            _collect(item, found)
    elif kind in LEAVES or isinstance(tree, Tensor):
        found.append(tree)
    else:
        found.extend(pytree.tree_leaves(tree))


def by_field(tree: Any) -> Any:
    """The tree with dataclasses as dicts of their fields, whether torch knows them or not. Those that are dicts too
    (outputs of transformers) become dicts of what they hold: they would drop an item that becomes None."""
    return pytree.tree_map(_fields, tree, is_leaf=_is_record)


def _is_record(item: Any) -> bool:
    return is_dataclass(item) and not isinstance(item, (type, Tensor))


def _fields(item: Any) -> Any:
    if not _is_record(item):
        return item
    if isinstance(item, Mapping):
        return {key: by_field(value) for key, value in item.items()}
    return {field.name: by_field(getattr(item, field.name, None)) for field in fields(item)}
