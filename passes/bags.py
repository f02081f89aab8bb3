"""Recognises `embedding_bag` with the same number of indices per sample, and replaces it by a call of `ops.bag`.

ATen takes the indices of all bags concatenated, with offsets: these cannot be split by samples.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops

aten = torch.ops.aten
MODES = ("sum", "mean", "max")


def bags(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: every change of sizes spelled `reshape`; bags of matrices traced as `capture.bags` has them.
    does: finds `embedding_bag` of a flattened matrix whose rows are the bags, and of bags of several lengths.
    gives: `ops.bag` and `ops.ragged_bags`. Lookups whose gradients are scaled by how often a row occurs, and those of
           which other results than the bags are used, stay as they are."""
    for node in edit.calls(gm, aten.embedding_bag.padding_idx):
        given, result = edit.args_of(node), _only_bags(node)
        if result is None or given["scale_grad_by_freq"]:
            continue
        rest = MODES[given["mode"]], _padding(given)
        even = _even(given)
        with edit.before(node):
            if even is not None:
                new = edit.call(node, ops.bag, given["weight"], *even, *rest)
            else:
                numbers = given["indices"], given["offsets"], given["per_sample_weights"]
                new = edit.call(node, ops.ragged_bags, given["weight"], *numbers, *rest, given["include_last_offset"])
        edit.replace(result, new)
        for user in list(node.users):
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
    return edit.finish(gm)


def _only_bags(node: fx.Node) -> fx.Node | None:
    """The first result of `node`, where no other one is used."""
    used = [user for user in node.users if user.users]
    return used[0] if len(used) == 1 and used[0].target is operator.getitem and used[0].args[1] == 0 else None


def _padding(given: dict[str, Any]) -> facts.Size:
    """The number of the row that counts nothing, -1 for none. ATen counts a negative one from the last row."""
    padding = given["padding_idx"]
    return -1 if padding is None else padding if padding >= 0 else padding + facts.shape(given["weight"])[0]


def _even(given: dict[str, Any]) -> tuple[fx.Node, fx.Node | None] | None:
    """The matrices of indices and of weights whose rows are the bags; None where bags have different lengths, or it is
    not known."""
    chosen, gates = _rows(given["indices"]), given["per_sample_weights"]
    rows = None if gates is None else _rows(gates)
    if chosen is None or given["include_last_offset"] or not _begins(given["offsets"], *facts.shape(chosen)):
        return None
    if gates is not None and (rows is None or facts.shape(rows) != facts.shape(chosen)):
        return None
    return chosen, rows


def _rows(flat: Any) -> fx.Node | None:
    """The matrix whose concatenated rows are `flat`."""
    shaped = edit.call_of(flat, aten.reshape.default)
    source = None if shaped is None else shaped.args[0]
    return source if isinstance(source, fx.Node) and facts.rank(source) == 2 and facts.rank(flat) == 1 else None


def _begins(offsets: Any, rows: facts.Size, width: facts.Size) -> bool:
    """Whether `offsets` is `arange(rows) * width`; a factor of 1 is left out."""
    times = edit.call_of(offsets, aten.mul.Tensor)
    numbers, step = (offsets, 1) if times is None else times.args
    size = facts.as_size(step.meta["val"], step.graph.owning_module) if isinstance(step, fx.Node) else step
    counted = edit.call_of(numbers, aten.arange.default)
    return counted is not None and facts.shape(counted) == (rows,) and bool(size == width)
