"""Which values get a gradient: those from which the loss is reached without a detach.

A value may come from parameters and yet get none: the batch statistics that only update running averages, a metric.
Autograd moves nothing back through them, so nothing may be priced or emitted for it.
"""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

NO_GRADIENT = (aten.detach.default, aten.empty_like.default, aten.full_like.default, aten.new_empty.default, aten.new_full.default,
               aten.new_ones.default, aten.new_zeros.default, aten.ones_like.default, aten.rand_like.default, aten.randn_like.default,
               aten.zeros_like.default)
"""Operators that autograd does not record, though their operand may need a gradient."""


def reaching(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """Nodes of `gm` and of its bodies that the loss depends on differentiably. The values that a run of blocks carries on
    are taken to be needed all together."""
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    results = zip(output.args[0], gm.meta["outputs"], strict=True)
    return _walk(gm, [node for node, about in results if about["kind"] == "loss" and isinstance(node, fx.Node)])


def _walk(gm: fx.GraphModule, ends: list[fx.Node]) -> dict[fx.Node, None]:
    """`ends` and everything in `gm` that leads to them, last first."""
    found = dict.fromkeys(ends)
    for node in reversed(gm.graph.nodes):
        if node in found and node.op == "call_module":
            found |= _body(gm, node)
        elif node in found and node.op == "call_function" and _differentiable(node):
            found |= dict.fromkeys(node.all_input_nodes)
    return found


def _body(gm: fx.GraphModule, call: fx.Node) -> dict[fx.Node, None]:
    """What one run of blocks needs: inside its body, and of its arguments."""
    body = gm.get_submodule(str(call.target))
    assert isinstance(body, fx.GraphModule)
    inside = _walk(body, edit.results(body))
    ports = [node for node in body.graph.nodes if node.op == "placeholder" and "fqns" not in node.meta and facts.tensors(node)]
    feeds = [node for node in call.args if isinstance(node, fx.Node) and facts.tensors(node)]
    return inside | dict.fromkeys(feed for port, feed in zip(ports, feeds, strict=True) if port in inside)


def _differentiable(node: fx.Node) -> bool:
    return node.target not in NO_GRADIENT and (not facts.tensors(node) or facts.is_float(node))
