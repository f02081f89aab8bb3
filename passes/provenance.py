"""Where each node comes from: the module path and the user's source line."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from passes import edit

_TORCH_DIR = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_REPEATED_CALL = re.compile(r"@\d+$")


def provenance(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: `nn_module_stack` and `stack_trace` as export leaves them, on nodes of the graph and its subgraphs.
    does: reads the innermost module and the last frame outside torch.
    gives: `meta["module"]` ("transformer.h.0.attn", "" for the top) and `meta["source"]` ("file.py:41" or "")."""
    for node in edit.nodes(gm):
        # nodes that export inserts have no place in the model
        is_size = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
        node.meta.setdefault("module", "" if is_size else module_path(node))
        node.meta.setdefault("source", "" if is_size else source_line(node))
    return gm


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that the node was traced in, "" for the top module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return _REPEATED_CALL.sub("", path)


def source_line(node: fx.Node) -> str:
    """`file.py:41` of the last frame outside torch, "" when the trace has none."""
    found = ""
    for path, line in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if not path.startswith(_TORCH_DIR):
            found = f"{Path(path).name}:{line}"
    return found
