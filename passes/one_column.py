"""Rows that are picked by `mask.nonzero()` as it is, an index of one column, picked by that column.

    index = (chosen == number).nonzero()          # [n, 1]
    out[index] += expert(hidden[index])           # rows [n, 1, d]

What is computed of such rows has a dim of size 1 behind that of the rows, which none of the passes on selected rows
expects. Where it is computed row by row, it is computed without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.masked import FINITE_AT_ZERO, NORMS

aten = torch.ops.aten

BY_ROW = (*FINITE_AT_ZERO, *NORMS, aten.dropout.default, aten.linear.default, aten.matmul.default)
"""Operators that compute the last dims of each row by themselves, so that dims of size 1 in front may go."""


def one_column(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators.
    does: rows that are written to the true places of a vector, given as a matrix of one column, are computed and
           written by that column.
    gives: the same rows in the form of `mask.nonzero().squeeze(1)`."""
    made: dict[Any, Any] = {}
    for node in edit.calls(gm, aten.index_put.default):
        given = edit.args_of(node)
        index = given["indices"][0]
        if len(given["indices"]) != 1 or not _is_column(index) or facts.rank(given["values"]) < 2:
            continue
        if facts.shape(given["values"])[:2] != facts.shape(index):
            continue  # one row for all places
        with edit.before(node):
            rows = _rows(given["values"], index, node, made)
            args = given["self"], [_column(index, node, made)], rows, given["accumulate"]
            new = edit.call(node, aten.index_put.default, *args)
        edit.replace(node, new)
    return edit.finish(gm) if made else gm


def _is_column(index: Any) -> bool:
    """Whether `index` has the places of the true elements of a vector, as a matrix of one column."""
    return edit.call_of(index, aten.nonzero.default) is not None and facts.shape(index)[1] == 1


def _column(index: fx.Node, node: fx.Node, made: dict[Any, Any]) -> fx.Node:
    """`index` as a vector."""
    if index not in made:
        made[index] = edit.call(node, aten.squeeze.dim, index, 1)
    return made[index]


def _rows(value: Any, index: fx.Node, node: fx.Node, made: dict[Any, Any]) -> Any:
    """`value [n, 1, ...]` as [n, ...], computed anew where it is made of picked rows row by row."""
    if (value, index) not in made:
        made[value, index] = _anew(value, index, node, made)
    return made[value, index]


def _anew(value: fx.Node, index: fx.Node, node: fx.Node, made: dict[Any, Any]) -> fx.Node:
    picked = edit.call_of(value, aten.index.Tensor)
    if picked is not None and [*(given := edit.args_of(picked))["indices"]] == [index]:
        return edit.call(value, aten.index.Tensor, given["self"], [_column(index, node, made)])
    widened = edit.call_of(value, aten.unsqueeze.default)
    if widened is not None and (dim := (given := edit.args_of(widened))["dim"] % facts.rank(value)) > 1:
        return edit.call(value, aten.unsqueeze.default, _rows(given["self"], index, node, made), dim - 1)
    if value.op != "call_function" or value.target not in BY_ROW or not _by_row(value):
        return edit.call(node, aten.squeeze.dim, value, 1)
    rank = facts.rank(value)

    def without(item: Any) -> Any:
        wide = isinstance(item, fx.Node) and facts.is_tensor(item) and facts.rank(item) == rank
        return _rows(item, index, node, made) if wide else item

    args, kwargs = fx.map_arg((value.args, value.kwargs), without)
    return edit.call(value, value.target, *args, **kwargs)


def _by_row(value: fx.Node) -> bool:
    """Whether the operands of `value` are [n, 1, ...] as it is, or have neither of these dims."""
    rank, lead = facts.rank(value), facts.shape(value)[:2]
    operands = edit.tensor_operands(value)
    if value.target in (aten.linear.default, aten.matmul.default):
        operands, others = operands[:1], operands[1:]
        if rank < 3 or any(facts.rank(other) > 2 for other in others):
            return False
    elif value.target in NORMS and facts.rank(value) - len(edit.args_of(value)["normalized_shape"]) < 2:
        return False
    return all(
        facts.shape(item)[:2] == lead if facts.rank(item) == rank else facts.rank(item) <= rank - 2
        for item in (operands[:1] if value.target in NORMS else operands)
    )
