"""Recognises a layer of experts in its sorted form, and replaces it by a call of `ops.experts`.

Libraries sort the (token, expert) pairs by expert, run grouped matmuls over the sorted rows, undo the sorting and sum
up, or add each row to its token. The order of rows depends on data, so the operators in between cannot be split by
tokens; the layer as a whole can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.expert_activation import written
from passes.expert_layer import Layer, called, in_front, is_zeros, put, uncast
from passes.sorted_rows import (
    Order,
    bias_of,
    divided,
    ends_with_experts,
    in_each_column,
    in_order,
    is_token,
    order_of,
    rows_of,
    undone,
)

aten = torch.ops.aten

SUMS = {aten.scatter_add.default: (1, 2, 3), "torchtitan.deterministic_scatter_add.default": (None, 1, 2)}
"""Operators that add rows at the positions in each column of an index -> their arguments for the dim (None: the first
dim), the index and the rows. Operators of libraries, which exist only where these are imported, by name."""


@dataclass(frozen=True)
class _Sum:
    """`rows [n, k, d]`, times `gates [n, k]` if there are any, summed over the k experts of each token."""

    rows: Any
    order: Order
    gates: fx.Node | None = None


def experts(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: `ops.grouped_matmul` and `ops.count_each`, flattening reshapes sunk.
    does: finds sums over the k experts of each token, whose terms are sorted rows that have passed two layers of
           grouped matmuls.
    gives: `ops.experts` on tokens that keep batch and sequence apart; layers of any other form stay as they are."""
    if not any(edit.calls(gm, ops.grouped_matmul)):
        return gm
    for node in edit.calls(gm):
        total = _summed(node) or _added(node)
        if total is None:
            continue
        with edit.before(node):
            layer = _layer(total)
            if layer is not None:
                put(node, called(layer, node))
    return edit.finish(gm)


def _summed(node: fx.Node) -> _Sum | None:
    """The sum over dim 1 of `[n, k, d]`, for rows brought back to the order of pairs; None for other nodes."""
    total = edit.call_of(node, aten.sum.dim_IntList)
    if total is None or list(total.args[1]) != [1] or len(total.args) > 2:  # type: ignore[arg-type]
        return None
    terms, gates = edit.call_of(uncast(total.args[0]), aten.reshape.default, aten.mul.Tensor), None
    if terms is not None and terms.target is aten.mul.Tensor:
        terms, gates = _gated(terms)
    back = undone(uncast(terms.args[0])) if terms is not None and facts.rank(terms) == 3 else None
    order = order_of(back[1]) if back is not None else None
    if back is None or order is None or facts.shape(terms)[:2] != facts.shape(order.chosen):  # type: ignore[arg-type]
        return None
    return (
        _weighted(back[0], order)
        if gates is None
        else _Sum(back[0], order, gates)
        if facts.shape(gates) == facts.shape(order.chosen)
        else None
    )


def _gated(product: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """`terms [n, k, d]` and `gates [n, k]` of the product `terms * gates.unsqueeze(-1)`; None for other products."""
    for one, other in (product.args, product.args[::-1]):
        terms, column = (
            edit.call_of(uncast(one), aten.reshape.default),
            edit.call_of(uncast(other), aten.unsqueeze.default, aten.reshape.default),
        )
        if terms is not None and column is not None and facts.shape(column)[2:] == (1,):
            return terms, column.args[0]  # type: ignore[return-value]
    return None, None


def _added(node: fx.Node) -> _Sum | None:
    """Sorted rows added to zeros, each at the row of its token; None for other nodes."""
    places: Any = SUMS.get(node.target) or SUMS.get(str(node.target))
    if places is not None:
        dim, index, rows = (None if place is None else node.args[place] for place in places)
        token = in_each_column(index) if dim in (None, 0) else None
    elif node.target is aten.index_add.default:
        given = edit.args_of(node)
        token, rows = (given["index"], given["source"]) if given["dim"] == 0 and given["alpha"] == 1 else (None, None)
    elif node.target is aten.index_put.default and edit.args_of(node)["accumulate"]:
        given = edit.args_of(node)
        token, rows = given["indices"][0] if len(given["indices"]) == 1 else None, given["values"]
    else:
        return None
    number = divided(token)
    order = order_of(number.args[0]) if number is not None and is_zeros(node.args[0]) else None
    return _weighted(rows, order) if order is not None and is_token(token, order) else None


def _weighted(rows: Any, order: Order) -> _Sum:
    """Sorted rows and the gates that they are multiplied by; the gates are None where there are none."""
    product = edit.call_of(uncast(rows), aten.mul.Tensor)
    for one, other in () if product is None else (product.args, product.args[::-1]):
        if (gates := in_order(uncast(other), order)) is not None:
            return _Sum(one, order, gates)
    return _Sum(rows, order)


def _layer(total: _Sum) -> Layer | None:
    """The layer of experts that computes `total`; None where any part has another form."""
    order = total.order
    down, down_bias = _linear(uncast(total.rows), order)
    sources = _sources(down.args[0], order) if down is not None else []
    firsts = [_linear(source, order) for source in sources]
    if down is None or not 1 <= len(sources) <= 2 or (inner := written(down.args[0], *sources)) is None:
        return None
    ups = [up for up, _ in firsts if up is not None]
    if not all(ends_with_experts(each.args[2], order, facts.shape(each.args[1])[0]) for each in (down, *ups)):  # type: ignore[arg-type]
        return None
    rows = [rows_of(uncast(up.args[0])) for up in ups]
    hidden = {
        (row[0], facts.dtype(up.args[0]))  # type: ignore[arg-type]
        for row, up in zip(rows, ups, strict=True)
        if row is not None and is_token(row[1], order)
    }
    biases = [bias for _, bias in firsts if bias is not None]
    if None in rows or len(hidden) != 1 or len(biases) not in (0, len(ups)):
        return None
    tokens, dtype = hidden.pop()
    if facts.rank(tokens) != 2:
        return None
    gates = in_front(aten.ones_like.default, order.chosen, dtype=dtype) if total.gates is None else total.gates
    bias = [_cast(_joined(biases, 1), dtype)] if biases else []
    down_bias = None if down_bias is None else _cast(down_bias, facts.dtype(down))
    return Layer(
        _cast(tokens, dtype),
        order.chosen,
        gates,
        (_joined([up.args[1] for up in ups], 2), down.args[1], inner, *bias),  # type: ignore[arg-type, misc]
        down_bias,
    )


def _joined(tensors: list[fx.Node], dim: int) -> fx.Node:
    """The concatenation of `tensors` along `dim`, at the insertion point."""
    return tensors[0] if len(tensors) == 1 else edit.call(tensors[0], aten.cat.default, tensors, dim)


def _cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`node` cast to `dtype`, at the insertion point."""
    return node if facts.dtype(node) == dtype else in_front(aten.to.dtype, node, dtype)


def _linear(node: Any, order: Order) -> tuple[fx.Node | None, fx.Node | None]:
    """The grouped matmul that computes `node`, and the biases `[e, u]` of all experts if each row's is added."""
    for one, other in (
        (node, None),
        *(
            zip(node.args, node.args[::-1], strict=True)
            if edit.call_of(node, aten.add.Tensor) and not node.kwargs
            else ()
        ),
    ):
        matmul = edit.call_of(one, ops.grouped_matmul)
        if matmul is not None and other is None:
            return matmul, None
        if matmul is not None and (bias := bias_of(other, order)) is not None:
            return matmul, bias
    return None, None


def _sources(node: Any, order: Order) -> list[fx.Node]:
    """The results of the first layers on which `node` depends, in the order of the graph."""
    found: dict[fx.Node, None] = {}
    seen, open_ = set[fx.Node](), [node]
    while open_:
        here = open_.pop()
        if not isinstance(here, fx.Node) or here in seen:
            continue
        seen.add(here)
        if _linear(here, order)[0] is not None:
            found[here] = None
        else:
            open_.extend(here.all_input_nodes)
    return sorted(found)
