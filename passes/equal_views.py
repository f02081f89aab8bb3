"""Merges equal views (common subexpressions): `gates[:, 0]`, which a loop over experts takes again for each expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit
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
    first: dict[Any, fx.Node] = {}
    for node in edit.calls(gm, *VIEWS):
        key = (node.target, repr(node.args), repr(node.kwargs))
        if first.setdefault(key, node) is not node:
            edit.merge(node, first[key])
    return edit.finish(gm)
