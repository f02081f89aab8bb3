"""Recognises tensors that are split into rows and concatenated again: `torch.cat(list(x))`.

In between there is one operator per sample, and no batch dim that could be split.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def rejoined(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: every change of sizes spelled `reshape`.
    does: finds pieces that one tensor was unbound into along its first dim, all of them, in order, concatenated or
           stacked again.
    gives: a reshape that merges the first two dims, or the tensor itself."""
    return edit.rewrite(gm, dict.fromkeys((aten.cat.default, aten.stack.default), _joined))


def _joined(node: fx.Node) -> fx.Node | None:
    """What `node` puts together again; None where it does not."""
    given = edit.args_of(node)
    source = _whole(given["tensors"]) if given["dim"] == 0 else None
    if source is None or node.target is aten.stack.default:
        return source
    rest = [edit.size(source, dim) for dim in range(2, facts.rank(source))]
    return edit.call(node, aten.reshape.default, source, [-1, *rest])


def _whole(pieces: Any) -> fx.Node | None:
    """The tensor, of two dims or more, that `pieces` are all rows of, in order."""
    splits = dict.fromkeys(piece.args[0] if piece.target is operator.getitem else None for piece in pieces)
    split = next(iter(splits), None)
    if (
        len(splits) != 1
        or not isinstance(split, fx.Node)
        or split.target is not aten.unbind.int
        or edit.args_of(split)["dim"] != 0
    ):
        return None
    source: fx.Node = split.args[0]  # type: ignore[assignment]  # what is unbound
    in_order = [piece.args[1] for piece in pieces] == list(range(len(facts.tensors(split))))
    return source if in_order and facts.rank(source) > 1 else None
