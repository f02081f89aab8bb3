"""Mixtures of experts: grouped matmuls and counts of tokens per expert in a form that runs on every device and
dtype."""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts, ops

aten = torch.ops.aten

GROUPED_MATMULS = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
"""By name: the first exists only where transformers is imported."""


def grouped(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: matmuls of rows sorted by group become `ops.grouped_matmul`, those of a group each per matrix `bmm`; a
           histogram of integers over 0 ... n-1 becomes `ops.count_each`.
    gives: expert layers without operators that exist for one device only."""
    for node in edit.calls(gm):
        with edit.before(node):
            if str(node.target) in GROUPED_MATMULS:
                if (product := _product(node)) is not None:
                    edit.replace(node, product)
            elif node.target is aten.histc.default and (numbers := _integers(node)) is not None:
                counts = edit.call(node, ops.count_each, numbers, node.args[1])
                edit.replace(node, edit.cast(counts, facts.dtype(node), like=node))
            elif (
                node.target is aten.bincount.default
                and edit.args_of(node)["weights"] is None
                and facts.shape(node) == (edit.args_of(node)["minlength"],)
            ):
                counts = edit.call(node, ops.count_each, node.args[0], facts.shape(node)[0])
                edit.replace(node, edit.cast(counts, facts.dtype(node), like=node))
    return edit.finish(gm)


def _product(node: fx.Node) -> fx.Node | None:
    """A grouped matmul `[n, k], [g, k, m] -> [n, m]` as the plain function, and one without ends, `[g, n, k], [g, k, m]
    -> [g, n, m]`, as a batched product; None (it stays) for groups of columns or of what is summed, and with a bias or
    another dtype."""
    rows, weights, ends, *rest = edit.args_of(node).values()
    if any(item is not None for item in rest) or facts.rank(weights) != 3:
        return None
    if ends is None:
        return edit.call(node, aten.bmm.default, rows, weights)
    return edit.call(node, ops.grouped_matmul, rows, weights, ends) if facts.rank(rows) == 2 else None


def _integers(node: fx.Node) -> fx.Node | None:
    """The integers that the histogram `node` counts one by one, before a cast to float (CPUs count floats only); else
    None."""
    given = edit.args_of(node)
    source = given["self"]
    if source.target is aten.to.dtype and not facts.is_float(source.args[0]):
        source = source.args[0]
    whole = given["min"] == 0 and given["max"] == given["bins"] - 1
    return source if whole and not facts.is_float(source) else None
