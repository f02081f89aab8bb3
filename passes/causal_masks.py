"""Recognises attention masks that are causal, or that hide nothing.

A mask built from sizes only is evaluated at several sizes and compared with the causal one; a causal mask becomes
`is_causal=True`, so that fused kernels run and queries can be split without a mask to slice.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes import edit, facts
from passes.evaluate import HIDDEN, depends_on_sizes_only, evaluate, trials

aten = torch.ops.aten


def causal_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops with devices dropped.
    does: evaluates each attention mask that no input, buffer or parameter goes into.
    gives: `is_causal=True` for a causal mask, no mask for one that hides nothing; all other masks stay."""
    verdicts: dict[fx.Node, str] = {}
    for node in edit.calls(gm, aten.scaled_dot_product_attention.default):
        given = edit.args_of(node)
        mask = given["attn_mask"]
        if mask is None:
            continue
        if mask not in verdicts:
            verdicts[mask] = verdict(mask)
        square = facts.shape(given["query"])[-2] == facts.shape(given["key"])[-2]
        causal = verdicts[mask] == "causal" and square
        if causal or verdicts[mask] == "open":
            node.args = (given["query"], given["key"], given["value"], None, given["dropout_p"], causal)
            node.kwargs = {key: value for key, value in node.kwargs.items() if key in ("scale", "enable_gqa")}
    return edit.finish(gm)


def verdict(mask: fx.Node) -> str:
    """ "causal", "open" (hides nothing) or "other" for the mask [..., q, k] that this node gives."""
    nodes = depends_on_sizes_only(mask)
    if nodes is None:
        return "other"
    along = {
        symbol
        for size in facts.value(mask).shape[-2:]
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    found = ""
    for trial in trials(nodes, along):
        try:
            kind = _kind(evaluate(nodes, trial))
        except (RuntimeError, IndexError):  # scaled constants need not fit together
            return "other"
        if kind != (found or kind) or kind == "other":
            return "other"
        found = kind
    return found


def _kind(mask: Tensor) -> str:
    """The verdict on the values of one mask [..., q, k]."""
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if not bool((seen | (mask <= HIDDEN)).all()):
            return "other"
    if bool(seen.all()):
        return "open"
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return "other"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if bool((seen == causal).all()) else "other"
