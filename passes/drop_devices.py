"""Drops where tensors are made: the emitted program puts its own device."""

from __future__ import annotations

import torch
from torch import fx

from passes import edit

aten = torch.ops.aten

PLACE = ("device", "pin_memory", "layout", "non_blocking")


def drop_devices(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: calls as captured, with `device=meta` baked into factory ops.
    does: removes device, layout and pinning from their keyword arguments.
    gives: a graph that runs where its inputs are, or where `torch.device(...)` says.
    """
    for node in edit.calls(gm):
        if any(key in node.kwargs for key in PLACE):
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACE}
    gm.recompile()
    return gm
