"""Merges equal expressions: masks that are computed twice, `F.cross_entropy(logits[labels >= 0], labels[labels >= 0])`,
and what `fold_repeats` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes import edit, facts
from passes.evaluate import is_random

aten = torch.ops.aten

MASK: dict[Any, int] = {
    aten.masked_scatter.default: 1,
    aten.masked_select.default: 1,
    aten.nonzero.default: 0,
    aten.nonzero_numpy.default: 0,
    aten.where.default: 0,
}
"""Operators that select by a mask -> the number of the mask's argument."""
INDEXED = (aten.index.Tensor, aten.index_put.default)
"""Operators with masks among their indices."""


def equal_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators.
    does: keeps the first of several masks that select rows and are the same expression.
    gives: one node for rows that are selected by equal masks."""
    masks = {mask for node in edit.calls(gm, *MASK, *INDEXED) for mask in _masks(node) if mask.op == "call_function"}
    if len(masks) < 2:
        return gm
    merge_equal(gm, masks.__contains__)
    return edit.finish(gm)


def merge_equal(gm: fx.GraphModule, merged: Callable[[fx.Node], bool]) -> None:
    """Keeps the first of several equal expressions among the calls that `merged` holds for."""
    numbers, first = _numbers(gm), dict[int, fx.Node]()
    for node in edit.calls(gm):
        if merged(node) and first.setdefault(numbers[node], node) is not node:
            edit.merge(node, first[numbers[node]])


def _masks(node: fx.Node) -> Iterator[fx.Node]:
    """The masks that `node` selects by."""
    given = node.args[1] if node.target in INDEXED else [node.args[MASK[node.target]]]
    for index in given:  # type: ignore[union-attr]
        if isinstance(index, fx.Node) and facts.is_tensor(index) and facts.dtype(index) == torch.bool:
            yield index


def _numbers(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """A number per node; nodes with equal numbers are equal expressions. A random operator equals no other, nor does a
    user's own, which may draw without saying so."""
    known: dict[Any, int] = {}
    found: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        own = getattr(node.target, "namespace", "aten") != "aten"
        named = map_arg((node.args, node.kwargs), lambda operand: _Number(found[operand]))
        key = (node.target, repr(named)) if node.op == "call_function" and not is_random(node) and not own else node
        found[node] = known.setdefault(key, len(known))
    return found


class _Number(int):
    """The number of an operand, whose text differs from that of every number among the arguments."""

    def __repr__(self) -> str:
        return f"#{int(self)}"
