"""What is drawn at random cannot be compared number by number: verification drops nothing, and says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.rules import rule_for
from passes import facts

aten = torch.ops.aten
DROPOUTS: dict[Any, int] = {aten.dropout.default: 1, aten.scaled_dot_product_attention.default: 4}
"""Operator -> position of its probability."""


def keep_all(gm: fx.GraphModule) -> tuple[str, ...]:
    """Set every dropout of a captured graph (in place) to drop nothing; what was changed, and which other operators draw
    random numbers and will therefore differ, as lines for the report."""
    silenced: list[str] = []
    others: list[str] = []
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target in DROPOUTS:
                    silenced += [node.name] if _keep(node) else []
                elif node.op == "call_function" and (rule := rule_for(node.target)) is not None and rule.random:
                    others.append(f"{node.name} ({facts.where(node)})")
            module.recompile()
    notes = [f"dropout is off in this comparison: {len(silenced)} operators ({', '.join(silenced[:3])}"
             f"{', ...' if len(silenced) > 3 else ''}) drop nothing on either side"] if silenced else []
    return (*notes, *(f"{name} draws random numbers: its values cannot agree" for name in others))


def _keep(node: fx.Node) -> bool:
    """Set one dropout's probability to 0; whether it was another."""
    at = DROPOUTS[node.target]
    before = (node.args, node.kwargs)
    node.args = (*node.args[:at], 0.0, *node.args[at + 1:]) if len(node.args) > at else node.args
    node.kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in node.kwargs.items()}
    return before != (node.args, node.kwargs)
