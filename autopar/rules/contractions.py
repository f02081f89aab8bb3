"""Contractions and lookups: matmuls, convolutions, attention, embedding, einsum."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.language import Call
from autopar.rules.rule import Rule
from passes import ops

aten = torch.ops.aten


def matmul(call: Call) -> str:
    """Batched dims of both sides align right, as torch.matmul broadcasts them."""
    one, other = (len(t.shape) for t in call.ins)
    if one == 1 or other == 1:
        left = "k" if one == 1 else "... m k"
        right = "k" if other == 1 else "... k n"
        out = " ".join(w for w in ("..." if max(one, other) > 1 else "", "m" if one > 1 else "", "n" if other > 1 else "") if w)
        return f"{left}, {right} -> {out}"
    if other == 2:
        return "... k, k n -> ... n"
    return "... m k, ... k n -> ... m n"


def einsum(call: Call) -> str:
    """The equation itself; an ellipsis stays whole."""
    left, right = call.args[0].replace(" ", "").split("->")
    ins = ", ".join(" ".join(word) for word in left.split(","))
    return f"{ins} -> {' '.join(right)}"


def convolution(call: Call) -> str:
    """Samples and output channels split; input channels leave a partial sum; height and width stay whole. Grouped: groups
    are not split."""
    spatial = len(call.ins[0].shape) - 2
    groups = call.args[6] if len(call.args) > 6 else call.kwargs.get("groups", 1)
    sizes = " ".join(f"h{i}!" for i in range(spatial))
    kernel = " ".join(f"k{i}!" for i in range(spatial))
    out = " ".join(f"o{i}!" for i in range(spatial))
    mark = "" if groups == 1 else "!"
    inner = "i" if groups == 1 else "j!"
    return f"b i{mark} {sizes}, o{mark} {inner} {kernel} -> b o{mark} {out}"


def attention(call: Call) -> str:
    """Samples, heads and the value's features split; keys stay whole; query rows split with `causal_rows`, or plainly where
    nothing depends on the position. Grouped query heads (enable_gqa) are split by key heads only."""
    query, key = call.ins[0].shape, call.ins[1].shape
    causal = (call.args[5] if len(call.args) > 5 else call.kwargs.get("is_causal", False)) is True
    rows = "q@causal_rows" if causal else "q"
    grouped = query[1] != key[1]
    heads, pairs = ("(h r)", "h") if grouped else ("h", "h")
    mask = ""
    if len(call.ins) > 3:
        words = ["b", heads, rows, "k!"][4 - len(call.ins[3].shape):]
        sizes = [query[0], query[1], query[2], key[2]][4 - len(call.ins[3].shape):]
        mask = ", " + " ".join("1" if n == 1 and s != 1 else w for w, n, s in zip(words, call.ins[3].shape, sizes, strict=True))
    return f"b {heads} {rows} d!, b {pairs} k! d!, b {pairs} k! v{mask} -> b {heads} {rows} v"


def embedding(call: Call) -> str:
    """A row per id; with the vocabulary split, ids of other ranks give zeros, so the parts sum up."""
    return "v@embedding d, ... -> ... d"


RULES: dict[Any, Rule] = {
    aten.bmm.default: Rule("b m k, b k n -> b m n", linear="each"),
    aten.conv1d.default: Rule(convolution, linear="each"),
    aten.conv2d.default: Rule(convolution, linear="each"),
    aten.conv3d.default: Rule(convolution, linear="each"),
    aten.einsum.default: Rule(einsum, linear="each"),
    aten.embedding.default: Rule(embedding),
    aten.linear.default: Rule("... i, o i -> ... o", linear="each"),
    aten.matmul.default: Rule(matmul, linear="each"),
    aten.mm.default: Rule("m k, k n -> m n", linear="each"),
    aten.mv.default: Rule("m k, k -> m", linear="each"),
    aten.scaled_dot_product_attention.default: Rule(attention),
    ops.count_valid: Rule("... -> "),
    ops.cross_entropy_each: Rule("... v!, ... -> ..."),
    ops.cross_entropy_sum: Rule("... v@cross_entropy, ... -> "),
}
