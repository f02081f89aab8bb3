"""Grouped-query attention without repeated keys and values.

Exported models repeat each key and value head for the query heads of its group, and then call plain attention. The
attention kernels can do that themselves (enable_gqa), without the copies and without keeping them for the backward.

Not done with a mask or with dropout: few fused kernels then support groups, and the unfused kernel keeps all attention
weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def grouped_heads(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: every change of sizes spelled `reshape`, copies dropped.
    does: finds attentions whose keys and values both are heads repeated by unsqueeze, expand, reshape.
    gives: `enable_gqa=True` on the heads themselves."""
    for node in edit.calls(gm, aten.scaled_dot_product_attention.default):
        given = edit.args_of(node)
        key, value = (_unrepeated(given[name]) for name in ("key", "value"))
        if key is None or value is None or facts.shape(key)[1] != facts.shape(value)[1]:
            continue
        if (
            given["enable_gqa"]
            or given["attn_mask"] is not None
            or given["dropout_p"]
            or not _one_each(given["query"], given["key"])
        ):
            continue
        node.args = (node.args[0], key, value, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
    return edit.finish(gm)


def _one_each(query: fx.Node, key: fx.Node) -> bool:
    """Whether there are as many heads of queries as of repeated keys: nothing is broadcast."""
    return facts.rank(query) == 4 and facts.shape(query)[1] == facts.shape(key)[1]


def _unrepeated(node: Any) -> fx.Node | None:
    """`x [b, h, s, d]` where `node [b, h r, s, d]` has each head of `x` r times in a row, else None."""
    joined = edit.call_of(node, aten.reshape.default)
    wide = edit.call_of(joined and joined.args[0], aten.expand.default)
    thin = edit.call_of(wide and wide.args[0], aten.unsqueeze.default)
    if wide is None or thin is None:
        return None
    (source, dim), sizes = thin.args, facts.shape(wide)
    if len(sizes) != 5 or dim not in (2, -3) or not isinstance(source, fx.Node):
        return None
    batch, heads, times, rows, features = sizes
    alike = facts.shape(source) == (batch, heads, rows, features)
    return source if alike and facts.shape(node) == (batch, heads * times, rows, features) else None
