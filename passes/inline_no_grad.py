"""Inlines `no_grad` regions.

Export wraps such a region as one higher-order call of a subgraph. Inlining a `no_grad` region without more would let
gradients flow through it, silently; so each float value that leaves it passes `aten.detach`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes._torch import HigherOrderOperator
from passes.drop_noops import drop_what_gives_itself

aten = torch.ops.aten
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_no_grad(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: regions as `wrap_with_set_grad_enabled` calls of subgraphs.
    does: inlines them, detaches what leaves a disabled region and marks what was in it.
    gives: a graph without higher-order calls; ValueError for grad enabled inside a no_grad region, and where functions
    are called in another way (scan, cond)."""
    _flatten(gm, grad=True)
    for node in edit.calls(gm):
        if isinstance(node.target, HigherOrderOperator):
            raise ValueError(
                f"{facts.where(node)} calls functions by {node.target.name()}, which a plan cannot look into: write a "
                "branch on values with torch.where and one on sizes as a plain if, a loop over positions in Python or "
                "as an operator on all of them (cumsum, torch.func.vmap)"
            )
    gm.recompile()
    return gm


def _flatten(gm: fx.GraphModule, *, grad: bool) -> None:
    """Inline the regions of one graph. `grad`: whether gradients flow where it runs."""
    drop_what_gives_itself(gm)
    for node in edit.calls(gm, _GRAD):
        enabled, body_node, *operands = node.args
        if enabled and not grad:
            raise ValueError(
                f"gradients are enabled inside a no_grad region at {facts.where(node)}: "
                "take the enable_grad part out of the no_grad region"
            )
        assert isinstance(body_node, fx.Node) and isinstance(enabled, bool)
        body = gm.get_submodule(str(body_node.target))
        assert isinstance(body, fx.GraphModule)
        _flatten(body, grad=enabled)
        if not enabled:
            _mark(body)
        env: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
        with edit.before(node):
            returned = gm.graph.graph_copy(body.graph, env)
        results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if grad and not enabled:
            # a tensor from outside is what it was
            results = [result if result in operands else _detached(result, node) for result in results]
        _hand_out(node, results)
        gm.graph.erase_node(node)
        if not body_node.users:
            gm.graph.erase_node(body_node)
    gm.delete_all_unused_submodules()


def _mark(body: fx.GraphModule) -> None:
    """`meta["no_grad"]` says that a node was in a disabled region."""
    for node in body.graph.nodes:
        node.meta["no_grad"] = True


def _detached(result: Any, region: fx.Node) -> Any:
    """The result of a region, detached where it is a floating-point tensor."""
    if not isinstance(result, fx.Node) or not facts.is_float(result):
        return result
    with edit.before(region):
        return edit.call(result, aten.detach.default, result)


def _hand_out(region: fx.Node, results: list[Any]) -> None:
    """Let readers of a region's results read these instead."""
    for user in list(region.users):
        if user.target is not operator.getitem:
            raise ValueError(f"the region {region.name} at {facts.where(region)} is used whole by {user.name}")
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        region.graph.erase_node(user)
