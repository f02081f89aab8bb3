"""Recognises operators that sort (token, choice) pairs by expert: the permutation, rows in sorted order, and where each
expert's rows end. Used by experts.

    numbers, order = chosen.view(-1).sort()          order = chosen.view(-1).argsort(stable=True)
    token = order // k                               back[order] = arange(n * k)
    x[token],  x.index_select(0, token),  x.gather(0, token.view(-1, 1).expand(-1, d))

A pair is a token with one of its k choices of experts, numbered token * k + choice. `chosen [n, k]` has the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.chosen import distinct
from passes.expert_layer import is_zeros, uncast
from passes.picked import taken

aten = torch.ops.aten

SORTS = (aten.sort.default, aten.sort.stable)
ARGSORTS = (aten.argsort.default, aten.argsort.stable)


@dataclass(frozen=True)
class Order:
    """The permutation `node [n k]`, made by `sort`, that sorts the pairs of `chosen [n, k]` by expert."""

    node: fx.Node
    sort: fx.Node
    chosen: fx.Node

    @property
    def choices(self) -> facts.Size:
        """k, the number of choices of each token."""
        return facts.shape(self.chosen)[1]

    def is_numbers(self, node: Any) -> bool:
        """Whether `node` has the expert of each pair, in sorted order."""
        return self.sort.target in SORTS and edit.part_of(node, 0) is self.sort


def order_of(node: Any) -> Order | None:
    """The permutation that `node` is, of pairs sorted in ascending order; None for other nodes."""
    sort = edit.call_of(edit.part_of(node, 1), *SORTS) or edit.call_of(node, *ARGSORTS)
    flat = edit.call_of(sort and sort.args[0], aten.reshape.default)
    if (
        sort is None
        or flat is None
        or facts.rank(flat) != 1
        or edit.args_of(sort)["dim"] not in (-1, 0)
        or edit.args_of(sort)["descending"]
    ):
        return None
    return Order(node, sort, flat.args[0]) if facts.rank(flat.args[0]) == 2 else None  # type: ignore[arg-type]


def divided(node: Any) -> fx.Node | None:
    """`node` if it is a floor division of integers, else None."""
    if (whole := edit.call_of(node, aten.floor_divide.default)) is not None:
        return whole
    rounded = edit.call_of(node, aten.div.Tensor_mode, aten.div.Scalar_mode)
    return rounded if rounded is not None and rounded.kwargs.get("rounding_mode") in ("floor", "trunc") else None


def is_token(node: Any, order: Order) -> bool:
    """Whether `node` has the token of each pair, in sorted order."""
    number = divided(node)
    return number is not None and number.args == (order.node, order.choices)


def rows_of(node: Any) -> tuple[fx.Node, Any] | None:
    """The tensor of which `node` takes rows, and the numbers of the rows; None for other nodes."""
    if (rows := taken(node)) is not None:
        return (rows[0], rows[1][0]) if len(rows[1]) == 1 else None
    gathered = edit.call_of(node, aten.gather.default)
    return None if gathered is None or gathered.args[1] != 0 else (gathered.args[0], in_each_column(gathered.args[2]))  # type: ignore[return-value]


def in_each_column(node: Any) -> Any:
    """`index [n]` where the node is `index.view(-1, 1).expand(-1, d)`; None for other nodes."""
    wide = edit.call_of(node, aten.expand.default)
    column = edit.call_of(wide and wide.args[0], aten.reshape.default, aten.unsqueeze.default)
    return (
        column.args[0]
        if column is not None and facts.rank(column.args[0]) == 1 and facts.shape(column)[1:] == (1,)
        else None
    )


def in_order(column: Any, order: Order) -> fx.Node | None:
    """`gates [n, k]` where `column [n k, 1]` has the gate of each pair in sorted order:
    `gates.view(-1)[order].unsqueeze(-1)`. None for other nodes."""
    flat = edit.call_of(column, aten.reshape.default, aten.unsqueeze.default)
    rows = rows_of(column if flat is None else flat.args[0]) if facts.shape(column)[1:] == (1,) else None
    if rows is None or rows[1] is not order.node:
        return None
    source = edit.call_of(rows[0], aten.unsqueeze.default) if flat is None else None
    whole = edit.call_of(rows[0] if source is None else source.args[0], aten.reshape.default)
    return whole.args[0] if whole is not None and facts.shape(whole.args[0]) == facts.shape(order.chosen) else None  # type: ignore[return-value, arg-type]


def undone(node: Any) -> tuple[Any, Any] | None:
    """Where `node` brings sorted rows back to the order of the pairs: these rows, and the permutation that sorted
    them."""
    back = edit.call_of(node, aten.index.Tensor)
    if back is not None and len(back.args[1]) == 1 and (order := _inverse(back.args[1][0])) is not None:  # type: ignore[arg-type, index]
        return back.args[0], order
    write = edit.call_of(node, aten.index_put.default)
    return (
        (write.args[2], write.args[1][0])  # type: ignore[index]
        if write is not None and len(write.args) == 3 and len(write.args[1]) == 1  # type: ignore[arg-type]
        else None
    )


def _inverse(index: Any) -> Any:
    """The permutation whose inverse is `index`: made by writing i at order[i], or by sorting the permutation."""
    if (sort := edit.call_of(index, *ARGSORTS)) is not None:
        return sort.args[0] if not edit.args_of(sort)["descending"] else None
    write = edit.call_of(index, aten.index_put.default)
    numbers = edit.call_of(write and len(write.args) == 3 and write.args[2], aten.arange.default)
    return (
        write.args[1][0]  # type: ignore[index]
        if write is not None and numbers is not None and len(numbers.args) == 1 and len(write.args[1]) == 1  # type: ignore[arg-type]
        else None
    )


def ends_with_experts(ends: Any, order: Order, experts: facts.Size) -> bool:
    """Whether `ends [experts]` is, for each expert, the number of sorted pairs of it and all experts before it."""
    running = edit.call_of(uncast(ends), aten.cumsum.default)
    return running is not None and _counts(running.args[0], order, experts)


def _counts(node: Any, order: Order, experts: facts.Size) -> bool:
    """Whether `node` has the number of pairs of each expert."""
    while edit.call_of(node, aten.to.dtype) is not None:
        node = uncast(node)
    if (counts := edit.call_of(node, ops.count_each)) is not None:
        numbers = uncast(counts.args[0])
        return bool(counts.args[1] == experts) and (order.is_numbers(numbers) or _is_chosen(numbers, order))
    total = edit.call_of(node, aten.sum.dim_IntList)
    marks = edit.call_of(uncast(total and total.args[0]), aten.scatter.value)
    if total is None or marks is None or not _each_once(total) or facts.shape(marks)[-1] != experts:
        return False
    start, dim, index, value = marks.args
    if dim not in (-1, facts.rank(marks) - 1) or not (value is True or value == 1):
        return False
    return is_zeros(start) and _is_chosen(index, order) and distinct(index)


def _each_once(total: fx.Node) -> bool:
    """Whether `total` is a sum over all dims but the last."""
    rank = facts.rank(total.args[0])
    return sorted(dim % rank for dim in edit.args_of(total)["dim"]) == [*range(rank - 1)] and len(total.args) == 2


def _is_chosen(node: Any, order: Order) -> bool:
    """Whether `node` is a reshape of `chosen`."""
    return _unshaped(node) is _unshaped(order.chosen)


def _unshaped(node: Any) -> Any:
    """The operand before reshapes."""
    while (shaped := edit.call_of(node, aten.reshape.default)) is not None:
        node = shaped.args[0]
    return node


def bias_of(node: Any, order: Order) -> fx.Node | None:
    """The biases `[e, u]` of all experts where `node` has the bias of each row's expert, in sorted order:
    `biases[numbers]` or `biases.repeat_interleave(counts, 0)`."""
    rows, repeated = taken(uncast(node)), edit.call_of(uncast(node), aten.repeat_interleave.self_Tensor)
    if rows is not None:
        return rows[0] if len(rows[1]) == 1 and order.is_numbers(rows[1][0]) and facts.rank(rows[0]) == 2 else None
    if repeated is None or edit.args_of(repeated)["dim"] != 0:
        return None
    biases, times = _without_slack(repeated.args[0]), _without_slack(uncast(repeated.args[1]))
    return biases if facts.rank(biases) == 2 and _counts(times, order, facts.shape(biases)[0]) else None


def _without_slack(node: Any) -> fx.Node:
    """`node` without one additional last row, which some models append for pairs beyond the last expert; it is empty
    where every pair has an expert."""
    joined = edit.call_of(node, aten.cat.default)
    parts: Any = joined.args[0] if joined is not None and edit.args_of(joined)["dim"] == 0 else ()
    return parts[0] if len(parts) == 2 and facts.shape(parts[1])[0] == 1 else node
