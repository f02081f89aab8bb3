"""Recognises a layer of experts in its sorted form and makes one call of `ops.experts` of it.

Libraries sort the (token, expert) pairs by expert, run grouped matmuls over the sorted rows, undo the sorting and sum up. Where a
row goes depends on data there, so nothing between the two sorts could be cut by tokens; the layer as a whole can.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.inner import written
from passes.sink_flatten import flattened, merge

aten = torch.ops.aten


@dataclass(frozen=True)
class _Layer:
    """The operands of `ops.experts`; `hidden [n, d]`, `chosen` and `gates [n, k]` still flattened. `bias` is that of the second layer, which is added outside:
    the experts that are cut by width each have a part of a sum."""

    hidden: fx.Node
    chosen: fx.Node
    gates: fx.Node
    weights: tuple[fx.Node | str, ...]
    bias: fx.Node | None


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
            tokens = _apart(layer.hidden, layer.chosen, layer.gates)
            new = edit.call(gm.graph, ops.experts, (*tokens, *layer.weights), like=node)
            if layer.bias is not None:
                more = edit.call(gm.graph, ops.bag, (layer.bias, *tokens[1:]), like=node)
                new = edit.call(gm.graph, aten.add.Tensor, (new, more), like=node)
            flat = edit.call(gm.graph, aten.reshape.default, (new, [-1, edit.size(new, -1)]), like=node)
            users = list(node.users)
            edit.replace(node, flat)
        for user in users:
            if user.target is aten.reshape.default:
                merge(user)
    return edit.finish(gm)


def _apart(*flat: fx.Node) -> tuple[fx.Node, ...]:
    """The operands before batch and sequence were merged, where that was done to all of them alike."""
    found = [source for node in flat if (source := flattened(node)) is not None]
    alike = len(found) == len(flat) and len({facts.shape(source)[:-1] for source in found}) == 1
    return tuple(found) if alike else flat


def _read(total: fx.Node) -> _Layer | None:
    """The layer whose last op is `total`, a sum over dim 1 of `[n, k, d]`; None where anything is not as expected."""
    terms = _is(total.args[0], aten.reshape.default)
    back = _is(terms and terms.args[0], aten.index.Tensor)
    weighted = _is(back and back.args[0], aten.mul.Tensor)
    if terms is None or back is None or weighted is None or list(total.args[1]) != [1] or len(total.args) > 2:  # type: ignore[arg-type]
        return None
    scale = _is(weighted.args[1], aten.unsqueeze.default)
    gate = _is(scale and scale.args[0], aten.index.Tensor)
    sort = _is(gate and _part(_only(gate), 1), aten.sort.default)
    if gate is None or sort is None or not _sorts_up(sort) or not _undoes(_only(back), _only(gate)):
        return None
    order, chosen, gates = _only(gate), _is(sort.args[0], aten.reshape.default), _is(gate.args[0], aten.reshape.default)
    down, down_bias = _linear(weighted.args[0], sort)
    source = _source(down.args[0], sort) if down is not None else None
    up, up_bias = _linear(source, sort)
    if chosen is None or gates is None or down is None or up is None or (inner := written(down.args[0], source)) is None:
        return None
    tokens, k = facts.shape(terms)[:2]
    rows = _is(up.args[0], aten.index.Tensor)
    number = _is(rows and _only(rows), aten.floor_divide.default)
    pairs = all(facts.shape(pair.args[0]) == (tokens, k) for pair in (chosen, gates))  # type: ignore[arg-type]
    if rows is None or number is None or number.args != (order, k) or not pairs or up.args[2] != down.args[2] or not _ends(up, sort):
        return None
    if len(facts.shape(rows.args[0])) != 2:  # type: ignore[arg-type]
        return None
    weights = (up.args[1], down.args[1], inner, *([] if up_bias is None else [up_bias]))
    return _Layer(rows.args[0], chosen.args[0], gates.args[0], weights, down_bias)  # type: ignore[arg-type]


def _linear(node: Any, sort: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The grouped matmul that `node` is, or is the sum of with each row's bias, and these biases `[e, u]`."""
    for one, other in ((node, None), *(zip(node.args, node.args[::-1], strict=True) if _is(node, aten.add.Tensor) and not node.kwargs else ())):
        matmul, bias = _is(one, ops.grouped_matmul), _is(other, aten.index.Tensor)
        if matmul is not None and other is None:
            return matmul, None
        if matmul is not None and bias is not None and _part(_only(bias), 0) is sort and len(facts.shape(bias.args[0])) == 2:  # type: ignore[arg-type]
            return matmul, bias.args[0]  # type: ignore[return-value]
    return None, None


def _source(node: Any, sort: fx.Node) -> Any:
    """What comes out of the first layer, which `node` is made of."""
    while isinstance(node, fx.Node) and _linear(node, sort)[0] is None:
        node = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    return node


def _is(node: Any, *targets: Any) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.target in targets else None


def _uncast(node: Any) -> Any:
    cast = _is(node, aten.to.dtype)
    return node if cast is None else cast.args[0]


def _only(index: fx.Node | None) -> Any:
    """The one index tensor of an `aten.index`, or None."""
    indices: Any = index.args[1] if index is not None else ()
    return indices[0] if len(indices) == 1 else None


def _part(node: Any, number: int) -> Any:
    """What `node` takes item `number` of, or None."""
    return node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == number else None


def _sorts_up(sort: fx.Node) -> bool:
    given = edit.args_of(sort)
    return given["dim"] in (-1, 0) and not given["descending"] and len(facts.shape(sort.args[0])) == 1  # type: ignore[arg-type]


def _undoes(index: Any, order: Any) -> bool:
    """Whether `index` is the inverse of the permutation `order`: zeros everywhere, then i written at order[i]."""
    write = _is(index, aten.index_put.default)
    if write is None or len(write.args) > 3:
        return False
    numbers, start = _is(write.args[2], aten.arange.default), _is(write.args[0], aten.empty_like.default)
    return numbers is not None and start is not None and list(write.args[1]) == [order] and len(numbers.args) == 1  # type: ignore[arg-type]


def _ends(up: fx.Node, sort: fx.Node) -> bool:
    """Whether the groups of `up` end where the sorted numbers of each expert end."""
    running = _is(up.args[2], aten.cumsum.default)
    counts = _is(_uncast(running and running.args[0]), ops.count_each)
    return counts is not None and _part(_uncast(counts.args[0]), 0) is sort and counts.args[1] == facts.shape(up.args[1])[0]  # type: ignore[arg-type]
