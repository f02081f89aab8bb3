"""Which values have gradients in training: those that depend on a trained parameter through differentiable
floating-point values. Used by passes, problem and codegen."""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

NO_GRADIENT = (
    aten.detach.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.histc.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.zeros_like.default,
)
"""Operators that autograd does not record, though their operand may need a gradient."""


def needs_grad(gm: fx.GraphModule) -> dict[fx.Node, bool]:
    """For each node whether a gradient flows into it in training.

    Float parameters do unless `meta["requires_grad"]` is False; inputs, buffers and constants do not, except body
    placeholders that say so by `meta["requires_grad"]`; a call does when its result is float and an operand does, a
    folded run of blocks also when its own parameters do.
    """
    found: dict[fx.Node, bool] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            default = node.meta.get("role") == "param"
            found[node] = bool(node.meta.get("requires_grad", default)) and facts.is_float(node)
        elif node.op in ("call_function", "call_module"):
            carries = (
                node.target not in NO_GRADIENT and any(found[operand] for operand in node.all_input_nodes)
            ) or _trains(gm, node)
            found[node] = carries and "val" in node.meta and facts.is_float(node)
        else:
            found[node] = False
    return found


def _trains(gm: fx.GraphModule, call: fx.Node) -> bool:
    """Whether the call is a run of blocks whose results carry a gradient of what is inside."""
    if call.op != "call_module":
        return False
    body = gm.get_submodule(str(call.target))
    assert isinstance(body, fx.GraphModule)
    carries = needs_grad(body)
    return any(carries[result] for result in edit.results(body))
