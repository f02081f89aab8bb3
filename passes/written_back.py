"""Selected rows that are written back to where they were selected, as `where(mask, new rows, old rows)` on all rows.

    h[h > 0] *= 2,  x[mask] = f(x[mask]),  x.masked_scatter(mask, f(x[mask]))
    labels[labels == pad] = -100,  frames[spans] = token    (the same for all rows)

Loops over experts are also written like this; passes.expert_loops runs before and replaces them.
"""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts
from passes.masked import Known, is_picked, mask_of_places, taken, whole, widened, zeroed

aten = torch.ops.aten


def written_back(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators; loops over experts found.
    does: finds values computed row by row on the rows that a mask selects, and written or added to the rows of that
           mask; and values that are the same for all its rows.
    gives: the same computation on all rows, without sizes that depend on data; other uses of selected rows stay as they
           are."""
    gm = edit.rewrite(gm, {aten.index_put.default: _filled})
    return taken(gm, {aten.index_put.default: _written, aten.masked_scatter.default: _scattered})


def _filled(node: fx.Node) -> fx.Node | None:
    """A write of the same number, or the same row, to all positions of a mask."""
    given = edit.args_of(node)
    base, values, mask = given["self"], given["values"], mask_of_places(given["indices"])
    if mask is None or given["accumulate"] or facts.rank(values) > facts.rank(base) - facts.rank(mask):
        return None
    if facts.shape(mask) != facts.shape(base)[: facts.rank(mask)]:
        return None  # sizes that are equal, but are not known to be
    wide = widened(mask, base, node)
    if (number := edit.call_of(values, aten.scalar_tensor.default)) is not None:
        return edit.call(node, aten.masked_fill.Scalar, base, wide, number.args[0])
    return edit.call(node, aten.where.self, wide, values, base) if facts.dtype(values) == facts.dtype(base) else None


def _written(node: fx.Node, known: Known) -> fx.Node | None:
    """`index_put` of selected rows at the positions of their mask, as `where` on all rows; with accumulate the selected
    rows are added."""
    given = edit.args_of(node)
    mask = mask_of_places(given["indices"])
    return (
        None
        if mask is None
        else _back(node, given["self"], mask, given["values"], known, added=bool(given.get("accumulate")))
    )


def _scattered(node: fx.Node, known: Known) -> fx.Node | None:
    """`masked_scatter` of selected elements at the positions that they were selected from."""
    given = edit.args_of(node)
    same = facts.shape(given["mask"]) == facts.shape(given["self"])
    return _back(node, given["self"], given["mask"], given["source"], known) if same else None


def _back(
    node: fx.Node, base: fx.Node, mask: fx.Node, values: fx.Node, known: Known, *, added: bool = False
) -> fx.Node | None:
    """`base` with `values`, which were selected by `mask`, at the true elements of `mask`. None where `values` were
    selected in another way, or have fewer dims than the rows."""
    found = whole(values, known) if is_picked(values) else None
    if (
        found is None
        or found.mask is not mask
        or facts.shape(found.rows) != facts.shape(base)
        or facts.dtype(values) != facts.dtype(base)
    ):
        return None
    rows = zeroed(found.rows, mask, node)
    if added:
        return edit.call(node, aten.add.Tensor, base, rows)
    return edit.call(node, aten.where.self, widened(mask, base, node), rows, base)
