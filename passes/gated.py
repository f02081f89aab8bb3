"""The gates by which the rows of one expert of a loop are multiplied, in the spellings that models use. Used by
expert_loops.

gates[token, rank],  gates[mask]              # [..., k], as what is chosen
(gates * (chosen == e)).sum(-1)[token]
gates[token]                                  # [...], where a token chooses one
every[token, e],  every[..., e][mask]         # [..., experts]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.expert_layer import flat, uncast
from passes.one_expert import rows_of
from passes.picked import RANK, TOKEN, Mask, mask_of, picked, taken, tokens
from passes.sink_flatten import flattened

aten = torch.ops.aten


@dataclass(frozen=True)
class Gates:
    """The gates of one expert's rows; None for `node` stands for gates of 1. `node` is `[..., k]`; or `[...]` where a
    token chooses one expert; or, with `all`, `[..., e]` with a gate for each expert. `summed`: the gates are summed
    over the choices of a token that are this expert."""

    node: fx.Node | None
    all: bool = False
    summed: bool = False


def gates_of(node: Any, mask: Mask) -> list[Gates]:
    """The possible sources of `node`, the gates of the rows that `mask` selects."""
    node = uncast(node)
    if edit.call_of(node, aten.unsqueeze.default, aten.reshape.default) is not None and facts.shape(node)[1:] == (1,):
        node = node.args[0]
    column = edit.call_of(node, aten.select.int)
    if (
        column is not None
        and column.args[1:] == (1, mask.number)
        and (every := rows_of(column.args[0], mask)) is not None
    ):
        return [Gates(every, all=True)]
    rows = taken(node)
    if rows is None:
        return []
    gates, indices = _without_last(rows[0], len(rows[1])), rows[1]
    if RANK in mask.dims and _by_places(indices, mask, gates):
        return [Gates(gates)]
    found = tokens(indices)
    return _of_tokens(gates, mask, found[1]) if len(indices) == 1 and found is not None and found[0] == mask else []


def _of_tokens(gates: fx.Node, mask: Mask, dims: int) -> list[Gates]:
    """The form of gates of single tokens, `[...]` with `dims` dims or `[..., 1]`, as an expert with `mask` reads
    them."""
    rank, merged = facts.rank(gates), edit.call_of(gates, aten.reshape.default)
    # one number for each token, in their order, in whatever shape
    total = edit.call_of(gates if merged is None else merged.args[0], aten.sum.dim_IntList)
    if total is not None and facts.shape(gates)[dims:] in ((), (1,)) and (summed := _summed(total, mask)) is not None:
        return [Gates(summed, summed=True)]
    found = [] if mask.ranked or rank != dims else [Gates(gates)]
    if (
        (column := edit.call_of(gates, aten.select.int)) is not None
        and column.args[2] == mask.number
        and rank == dims
        and column.args[1] in (-1, rank)
    ):
        found.append(Gates(column.args[0], all=True))  # type: ignore[arg-type]
    return found


def _summed(total: fx.Node, mask: Mask) -> fx.Node | None:
    """The gates in `(gates * (chosen == e)).sum(-1)`; None for other sums."""
    source, dims = total.args[:2]
    if list(dims) not in ([-1], [facts.rank(source) - 1]):  # type: ignore[arg-type]
        return None
    flat = edit.call_of(source, aten.reshape.default)
    if flat is not None and facts.shape(flat)[-1] == facts.shape(flat.args[0])[-1]:  # type: ignore[arg-type]
        source = flat.args[0]
    product = edit.call_of(source, aten.mul.Tensor)
    for one, other in () if product is None else (product.args, product.args[::-1]):
        there = mask_of(other)
        if (
            there is None
            or not there.ordered
            or there.over
            or (there.chosen, there.number) != (mask.chosen, mask.number)
        ):
            continue
        if facts.shape(one) == facts.shape(there.chosen):  # type: ignore[arg-type]
            return one  # type: ignore[return-value]
    return None


def _by_places(indices: list[Any], mask: Mask, gates: fx.Node) -> bool:
    """Whether `indices` select from `gates` what the mask selects: by token and rank, or by the mask itself."""
    if [picked(index) for index in indices] == [(mask, TOKEN), (mask, RANK)]:
        return facts.rank(gates) == 2
    return (
        len(indices) == 1
        and mask.ordered
        and mask_of(indices[0]) == mask
        and facts.shape(gates) == facts.shape(indices[0])
    )


def _without_last(node: Any, dims: int) -> fx.Node:
    """The operand of an operator that adds a last dim of size 1; else `node`."""
    apart = edit.call_of(node, aten.unsqueeze.default)
    return (
        apart.args[0] if apart is not None and facts.shape(apart)[-1] == 1 and facts.rank(apart) > dims else node  # type: ignore[return-value]
    )


def choice(mask: Mask, gates: Gates, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The chosen experts and the gates, each `[n, k]`, at the insertion point."""
    chosen, weights = mask.chosen, gates.node
    if not mask.ranked:
        chosen, weights = _one(chosen, like), weights if weights is None or gates.all else _one(weights, like)
    if weights is None:
        weights = edit.call(like, aten.ones_like.default, chosen, dtype=facts.dtype(like))
    elif gates.all:
        weights, chosen = _apart(weights, chosen)
        weights = edit.call(like, aten.gather.default, weights, facts.rank(chosen) - 1, chosen)
    return flat(chosen), flat(weights)


def _one(node: fx.Node, like: fx.Node) -> fx.Node:
    """`node [...]` as `[..., 1]`; where it is cut from flattened tokens, cut from the unflattened ones."""
    cut = edit.call_of(node, aten.select.int)
    if cut is None or cut.args[1] not in (1, -1) or flattened(cut.args[0]) is None:
        return edit.call(like, aten.unsqueeze.default, node, -1)
    return column(cut.args[0], int(cut.args[2]) % int(facts.shape(cut.args[0])[-1]), like)  # type: ignore[arg-type]


def column(node: fx.Node, place: int, like: fx.Node) -> fx.Node:
    """Column `place`, `[..., 1]`, of `node [..., k]`, at the insertion point; taken before a flattening if there is
    one."""
    source = flattened(node) or node
    return edit.call(like, aten.slice.Tensor, source, facts.rank(source) - 1, place, place + 1)


def _apart(weights: fx.Node, chosen: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Weights and chosen experts with equal dims except the last, both with flattened tokens or both without."""
    chosen, weights = flattened(chosen) or chosen, flattened(weights) or weights
    if facts.shape(weights)[:-1] != facts.shape(chosen)[:-1]:
        sizes = [*(edit.size(chosen, dim) for dim in range(facts.rank(chosen) - 1)), edit.size(weights, -1)]
        weights = edit.call(weights, aten.reshape.default, weights, sizes)
    return weights, chosen
