"""Recognises a layer of experts in its sorted form and makes one call of `ops.experts` of it.

Libraries sort the (token, expert) pairs by expert, run grouped matmuls over the sorted rows, undo the sorting and sum up. Where a
row goes depends on data there, so nothing between the two sorts could be cut by tokens; the layer as a whole can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.expert_layer import Layer, called, put, uncast
from passes.inner import written

aten = torch.ops.aten


def experts(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: `ops.grouped_matmul` and `ops.count_each`, flattening reshapes sunk.
    does: finds sums over the k experts of each token whose terms are sorted rows through two grouped matmuls.
    gives: `ops.experts` on tokens that keep batch and sequence apart; layers of any other form stay as they are.
    """
    for node in edit.calls(gm, aten.sum.dim_IntList):
        layer = _read(node)
        if layer is None:
            continue
        with edit.before(node):
            put(node, called(layer, node))
    return edit.finish(gm)


def _read(total: fx.Node) -> Layer | None:
    """The layer whose last op is `total`, a sum over dim 1 of `[n, k, d]`; None where anything is not as expected."""
    terms = edit.call_of(total.args[0], aten.reshape.default)
    back = edit.call_of(terms and terms.args[0], aten.index.Tensor)
    weighted = edit.call_of(back and back.args[0], aten.mul.Tensor)
    if terms is None or back is None or weighted is None or list(total.args[1]) != [1] or len(total.args) > 2:  # type: ignore[arg-type]
        return None
    scale = edit.call_of(weighted.args[1], aten.unsqueeze.default)
    gate = edit.call_of(scale and scale.args[0], aten.index.Tensor)
    sort = edit.call_of(gate and edit.part_of(_only(gate), 1), aten.sort.default)
    if gate is None or sort is None or not _sorts_up(sort) or not _undoes(_only(back), _only(gate)):
        return None
    order, chosen, gates = _only(gate), edit.call_of(sort.args[0], aten.reshape.default), edit.call_of(gate.args[0], aten.reshape.default)
    down, down_bias = _linear(weighted.args[0], sort)
    source = _source(down.args[0], sort) if down is not None else None
    up, up_bias = _linear(source, sort)
    if chosen is None or gates is None or down is None or up is None or (inner := written(down.args[0], source)) is None:
        return None
    tokens, k = facts.shape(terms)[:2]
    rows = edit.call_of(up.args[0], aten.index.Tensor)
    number = edit.call_of(rows and _only(rows), aten.floor_divide.default)
    pairs = all(facts.shape(pair.args[0]) == (tokens, k) for pair in (chosen, gates))  # type: ignore[arg-type]
    if rows is None or number is None or number.args != (order, k) or not pairs or up.args[2] != down.args[2] or not _ends(up, sort):
        return None
    if len(facts.shape(rows.args[0])) != 2:  # type: ignore[arg-type]
        return None
    weights = (up.args[1], down.args[1], inner, *([] if up_bias is None else [up_bias]))
    return Layer(rows.args[0], chosen.args[0], gates.args[0], weights, down_bias)  # type: ignore[arg-type]


def _linear(node: Any, sort: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The grouped matmul that `node` is, or is the sum of with each row's bias, and these biases `[e, u]`."""
    for one, other in ((node, None), *(zip(node.args, node.args[::-1], strict=True) if edit.call_of(node, aten.add.Tensor) and not node.kwargs else ())):
        matmul, bias = edit.call_of(one, ops.grouped_matmul), edit.call_of(other, aten.index.Tensor)
        if matmul is not None and other is None:
            return matmul, None
        if matmul is not None and bias is not None and edit.part_of(_only(bias), 0) is sort and len(facts.shape(bias.args[0])) == 2:  # type: ignore[arg-type]
            return matmul, bias.args[0]  # type: ignore[return-value]
    return None, None


def _source(node: Any, sort: fx.Node) -> Any:
    """What comes out of the first layer, which `node` is made of."""
    while isinstance(node, fx.Node) and _linear(node, sort)[0] is None:
        node = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    return node


def _only(index: fx.Node | None) -> Any:
    """The one index tensor of an `aten.index`, or None."""
    indices: Any = index.args[1] if index is not None else ()
    return indices[0] if len(indices) == 1 else None


def _sorts_up(sort: fx.Node) -> bool:
    given = edit.args_of(sort)
    return given["dim"] in (-1, 0) and not given["descending"] and len(facts.shape(sort.args[0])) == 1  # type: ignore[arg-type]


def _undoes(index: Any, order: Any) -> bool:
    """Whether `index` is the inverse of the permutation `order`: zeros everywhere, then i written at order[i]."""
    write = edit.call_of(index, aten.index_put.default)
    if write is None or len(write.args) > 3:
        return False
    numbers, start = edit.call_of(write.args[2], aten.arange.default), edit.call_of(write.args[0], aten.empty_like.default)
    return numbers is not None and start is not None and list(write.args[1]) == [order] and len(numbers.args) == 1  # type: ignore[arg-type]


def _ends(up: fx.Node, sort: fx.Node) -> bool:
    """Whether the groups of `up` end where the sorted numbers of each expert end."""
    running = edit.call_of(up.args[2], aten.cumsum.default)
    counts = edit.call_of(uncast(running and running.args[0]), ops.count_each)
    return counts is not None and edit.part_of(uncast(counts.args[0]), 0) is sort and counts.args[1] == facts.shape(up.args[1])[0]  # type: ignore[arg-type]
