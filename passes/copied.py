"""Marks the calls of `reshape`, `contiguous` and similar that made a copy; whether they give a view or a copy depends
on the strides of the operand."""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

COPIED = "copied"
"""Key in `meta` of a call that may give a view of its first operand, but made a copy."""
EITHER = (
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.ravel.default,
    aten.reshape.default,
    aten.reshape_as.default,
)
"""Operators that give a view or a copy, as the strides of the operand allow."""


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: values as torch.export left them, with the strides of the model (later passes create values with other
           strides).
    does: marks the calls of EITHER whose result is in another memory than their operand. In a subgraph (a `no_grad`
           region), calls on placeholders are not marked.
    gives: `meta[COPIED]`, for `inplace`."""
    for module in edit.graphs(gm):
        for node in edit.calls(module, *EITHER):
            operand = node.args[0]
            assert isinstance(operand, fx.Node)
            if (module is gm or operand.op != "placeholder") and facts.value(node).untyped_storage() is not facts.value(
                operand
            ).untyped_storage():
                node.meta[COPIED] = True
    return gm
