"""Merges equal expressions: `gates[:, 0]`, which a loop over experts takes again for each expert, and what
`fold_repeats` asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes import edit
from passes.evaluate import is_random
from passes.tables import VIEWS

aten = torch.ops.aten

PICKS = (aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default, aten.index_put.default)
"""Operators of loops over experts: only graphs with one of these are changed."""


def equal_views(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators.
    does: merges equal views, in graphs that have an operator of PICKS.
    gives: loops over experts whose operands are one node where they are one tensor."""
    if not any(edit.calls(gm, *PICKS)):
        return gm
    merge_equal(gm, lambda node: node.target in VIEWS)
    return edit.finish(gm)


def merge_equal(gm: fx.GraphModule, merged: Callable[[fx.Node], bool]) -> None:
    """Keeps the first of several equal expressions among the calls that `merged` holds for."""
    numbers, first = _numbers(gm), dict[int, fx.Node]()
    for node in edit.calls(gm):
        if merged(node) and first.setdefault(numbers[node], node) is not node:
            edit.merge(node, first[numbers[node]])


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
