"""Recognises image features that are written over image tokens by `masked_scatter`, and replaces it by a call of
`ops.fill_rows`.

`masked_scatter` takes its values from one flat sequence, whatever the sample of a position, so its source could not be
split by samples. Where every sample has as many features as image tokens, each sample takes its own. That depends on
data, and is checked at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.sink_flatten import flattened

aten = torch.ops.aten


def fills(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: flattening reshapes sunk, one spelling of reshapes and expansions.
    does: finds `masked_scatter` of whole rows of [b, s, d], and `x[mask] = rows`, from features of as many samples.
    gives: `ops.fill_rows`, which can be split by samples and by width. All other writes stay as they are."""
    return edit.rewrite(gm, {aten.masked_scatter.default: _scattered, aten.index_put.default: _put})


def _scattered(node: fx.Node) -> fx.Node | None:
    """A `masked_scatter` of whole rows as `ops.fill_rows`."""
    target, mask, source = node.args
    rows, which = _by_samples(source, facts.shape(node)), _of_rows(mask, facts.shape(node))
    if rows is None or which is None:
        return None
    return edit.call(node, ops.fill_rows, target, edit.call(node, aten.squeeze.dim, which, -1), rows)


def _put(node: fx.Node) -> fx.Node | None:
    """`x[mask] = rows` as `ops.fill_rows`."""
    given = edit.args_of(node)
    rows = _by_samples(given["values"], facts.shape(node))
    if rows is None or given["accumulate"] or len(given["indices"]) != 1:
        return None
    places = given["indices"][0]
    return edit.call(node, ops.fill_rows, given["self"], places, rows) if _is_mask(places, facts.shape(node)) else None


def _is_mask(index: Any, shape: tuple[facts.Size, ...]) -> bool:
    """Whether an index is a mask [b, s] of the rows of a target of `shape` [b, s, d]."""
    return (
        isinstance(index, fx.Node)
        and facts.dtype(index) == torch.bool
        and len(shape) == 3
        and facts.shape(index) == shape[:2]
    )


def _by_samples(source: Any, shape: tuple[facts.Size, ...]) -> fx.Node | None:
    """`source` as [b, n, d] for a target of `shape` [b, s, d], where it is that or was before it was flattened; n is
    the same for all samples."""
    found = source
    while isinstance(found, fx.Node):
        before = facts.shape(found)
        if len(shape) == len(before) == 3 and (before[0], before[2]) == (shape[0], shape[2]):
            return found
        found = flattened(found)
    return None


def _of_rows(mask: Any, shape: tuple[facts.Size, ...]) -> fx.Node | None:
    """`mask` as [b, s, 1], where whole rows of a target of `shape` [b, s, d] are in it or not."""
    while isinstance(mask, fx.Node):
        if facts.shape(mask) == (*shape[:2], 1):
            return mask
        mask = mask.args[0] if mask.target is aten.expand.default else None
    return None
