"""Recognises the two layers that one expert of a loop applies to the rows of its tokens. Used by expert_loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.expert_activation import written
from passes.expert_layer import uncast
from passes.picked import Mask, taken, tokens

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """Weight `[o, i]`, or `[i, o]` where it is `turned`, and bias `[o]`."""

    weight: fx.Node
    bias: fx.Node | None
    turned: bool

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that this layer must have in common with those of all experts."""
        return facts.shape(self.weight), self.bias is None, self.turned


@dataclass(frozen=True)
class Expert:
    """One expert: the layers that read `hidden [..., d]`, the last layer, and the pointwise function between them, as
    source. `dropped` is a dropout after the last layer."""

    hidden: fx.Node
    first: tuple[Linear, ...]
    second: Linear
    inner: str
    dropped: fx.Node | None

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that all experts of a layer must have in common."""
        dropout = None if self.dropped is None else (self.dropped.target, self.dropped.args[1:], self.dropped.kwargs)
        return self.hidden, self.inner, dropout, [linear.form for linear in (*self.first, self.second)]


def rows_of(node: Any, mask: Mask) -> fx.Node | None:
    """The tokens `[..., d]` from which `node` takes the rows that `mask` selects: of `hidden[token]`, `hidden[mask]` or
    `hidden[None, token]`."""
    rows = taken(_flat(node))
    if rows is None:
        return None
    hidden, indices = rows
    if (
        len(indices) == 2
        and indices[0] is None
        and (whole := edit.call_of(hidden, aten.unsqueeze.default)) is not None
        and whole.args[1] in (0, -3)
    ):
        hidden, indices = whole.args[0], indices[1:]  # type: ignore[assignment]
    found = tokens(indices) if len(indices) == 1 else None
    return hidden if found is not None and found[0] == mask and facts.rank(hidden) == found[1] + 1 else None


def expert_of(node: Any, mask: Mask) -> Expert | None:
    """The expert that computes `node`, on the rows of a mask's tokens; None where it is not two layers."""
    dropped = edit.call_of(_flat(_widened(node)), aten.dropout.default)
    second = _linear(_flat(_widened(node)) if dropped is None else _flat(dropped.args[0]))
    if second is None:
        return None
    sources = sorted(_firsts(second[0].args[0], mask, {}))
    linears = [linear for source in sources if (linear := _linear(source)) is not None]
    hiddens = {rows_of(linear.args[0], mask) for linear, _ in linears}
    inner = written(second[0].args[0], *sources) if 1 <= len(sources) <= 2 else None
    if len(hiddens) != 1 or inner is None:
        return None
    return Expert(hiddens.pop(), tuple(map(_weights, linears)), _weights(second), inner, dropped)  # type: ignore[arg-type]


def _widened(node: Any) -> Any:
    """The operand of `node` where that is a cast to a dtype that represents all its values; else `node`."""
    source = uncast(node)
    return (
        source
        if source is not node and torch.promote_types(facts.dtype(source), facts.dtype(node)) == facts.dtype(node)
        else node
    )


def _firsts(node: Any, mask: Mask, seen: dict[Any, None]) -> list[fx.Node]:
    """The results of the first layers (those that read tokens) on which `node` depends."""
    if node in seen or not isinstance(node, fx.Node):
        return []
    seen[node] = None
    linear = _linear(node)
    if linear is not None and rows_of(linear[0].args[0], mask) is not None:
        return [node]
    return [found for operand in node.all_input_nodes for found in _firsts(operand, mask, seen)]


def _flat(node: Any) -> Any:
    """The operand of a reshape that only adds or removes dims of size 1; else `node`."""
    shaped = edit.call_of(node, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default)
    if shaped is None:
        return node
    before, after = ([size for size in facts.shape(value) if size != 1] for value in (shaped.args[0], shaped))  # type: ignore[arg-type]
    return shaped.args[0] if before == after else node


def _linear(node: Any) -> tuple[fx.Node, fx.Node | None] | None:
    """The contraction that computes `node`, and the bias that is added to it, if any; None for other nodes."""
    total = edit.call_of(node, aten.add.Tensor)
    for one, other in ((node, None), *(() if total is None or total.kwargs else (total.args, total.args[::-1]))):
        linear = edit.call_of(one, aten.linear.default, aten.matmul.default)
        if linear is None or len(linear.args) != 2 or facts.rank(linear.args[1]) != 2:
            continue
        if other is None or (isinstance(other, fx.Node) and facts.rank(other) == 1):
            return linear, other
    return None


def _weights(linear: tuple[fx.Node, fx.Node | None]) -> Linear:
    """The weight and bias of a contraction as a Linear."""
    return Linear(linear[0].args[1], linear[1], linear[0].target is aten.matmul.default)  # type: ignore[arg-type]
