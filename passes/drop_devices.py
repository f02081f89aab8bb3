"""Removes device arguments: the emitted program inserts its own device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes._torch import FakeTensor

PLACE = ("device", "pin_memory", "layout", "non_blocking")
"""Keyword arguments that say where and how a tensor is stored."""


def drop_devices(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: calls as captured, with `device=meta` baked into factory ops.
    does: removes device, layout and pinning from their keyword arguments. Where some values are on meta, all others (of
           tensors from outside the model, and what is computed from these alone) are moved there.
    gives: a graph that runs where its inputs are, or where `torch.device(...)` says, with all values on one device."""
    for node in edit.calls(gm):
        if any(key in node.kwargs for key in PLACE):
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACE}
    made = [node for node in gm.graph.nodes if "val" in node.meta]
    if any(value.is_meta for node in made for value in facts.tensors(node)):
        for node in made:
            if not all(value.is_meta for value in facts.tensors(node)):
                node.meta["val"] = fx.node.map_aggregate(node.meta["val"], _on_meta)
    gm.recompile()
    return gm


def _on_meta(value: Any) -> Any:
    """A fake tensor moved to meta; any other value as it is."""
    if not isinstance(value, FakeTensor):
        return value
    with torch.no_grad(), value.fake_mode:
        return value.to("meta")
