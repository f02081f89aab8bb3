"""What one expert of a loop does to the rows of tokens that chose it: the gates it is weighted with, and its two layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.expert_layer import uncast
from passes.inner import written
from passes.picked import RANK, Mask, picked

aten = torch.ops.aten

Linear = tuple[fx.Node, fx.Node | None]
"""Weight `[o, i]` and bias `[o]`."""


def gates_of(node: Any, token: Any, mask: Mask) -> fx.Node | None:
    """Of `gates[token, rank, None]` the gates `[n, k]`, or `[n]` where a token chooses one."""
    node = uncast(node)
    if edit.call_of(node, aten.unsqueeze.default, aten.reshape.default) is not None and facts.shape(node)[1:] == (1,):
        node = node.args[0]
    taken = edit.call_of(node, aten.index.Tensor)
    if taken is None:
        return None
    gates, apart = taken.args[0], edit.call_of(taken.args[0], aten.unsqueeze.default)
    if apart is not None and facts.shape(apart)[-1] == 1:
        gates = apart.args[0]
    indices: Any = taken.args[1]
    first, *more = indices
    ranks = [picked(index) for index in more]
    known = first is token and all(rank == (mask, RANK) for rank in ranks) and len(more) == mask.dims.count(RANK)
    return gates if known and len(facts.shape(gates)) == len(indices) else None  # type: ignore[return-value, arg-type]


def expert_of(node: Any, token: Any) -> tuple[fx.Node, tuple[Linear, ...], Linear, str] | None:
    """Tokens, the layers before and behind what is pointwise, and that as a text."""
    second = _linear(_flat(node))
    if second is None:
        return None
    sources = sorted(_firsts(second[0].args[0], token, {}))
    linears = [linear for source in sources if (linear := _linear(source)) is not None]
    hiddens = {_tokens(linear.args[0], token) for linear, _ in linears}
    inner = written(second[0].args[0], *sources) if 1 <= len(sources) <= 2 else None
    if len(hiddens) != 1 or inner is None:
        return None
    return hiddens.pop(), tuple(map(_weights, linears)), _weights(second), inner  # type: ignore[return-value]


def _firsts(node: Any, token: Any, seen: dict[Any, None]) -> list[fx.Node]:
    """The results of the layers that read tokens, on the way from `node` to them."""
    if node in seen or not isinstance(node, fx.Node):
        return []
    seen[node] = None
    linear = _linear(node)
    if linear is not None and _tokens(linear[0].args[0], token) is not None:
        return [node]
    return [found for operand in node.all_input_nodes for found in _firsts(operand, token, seen)]


def _tokens(node: Any, token: Any) -> fx.Node | None:
    """The tokens `[n, d]` of which `node` has the rows at `token`: `hidden[token]` or `hidden[None, token]`."""
    rows = edit.call_of(_flat(node), aten.index.Tensor)
    if rows is None:
        return None
    hidden, indices = rows.args
    if indices == [None, token] and (whole := edit.call_of(hidden, aten.unsqueeze.default)) is not None and whole.args[1] in (0, -3):
        hidden, indices = whole.args[0], [token]
    return hidden if indices == [token] and len(facts.shape(hidden)) == 2 else None  # type: ignore[return-value, arg-type]


def _flat(node: Any) -> Any:
    """What is behind a reshape from `[1, n, d]` to `[n, d]` or back."""
    shaped = edit.call_of(node, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default)
    alike = shaped is not None and [size for size in facts.shape(shaped) if size != 1] == [size for size in facts.shape(shaped.args[0]) if size != 1]  # type: ignore[arg-type]
    return shaped.args[0] if shaped is not None and alike else node


def _linear(node: Any) -> tuple[fx.Node, fx.Node | None] | None:
    """The contraction that `node` is, or is the sum of with a bias, and that bias."""
    total = edit.call_of(node, aten.add.Tensor)
    for one, other in ((node, None), *(() if total is None or total.kwargs else (total.args, total.args[::-1]))):
        linear = edit.call_of(one, aten.linear.default)
        if linear is not None and len(linear.args) == 2 and (other is None or (isinstance(other, fx.Node) and len(facts.shape(other)) == 1)):
            return linear, other
    return None


def _weights(linear: tuple[fx.Node, fx.Node | None]) -> Linear:
    return linear[0].args[1], linear[1]  # type: ignore[return-value]
