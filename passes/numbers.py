"""Python numbers that are added on the way to a loss, as tensors.

A rank (or microbatch) with a partial sum must not add the whole number, and an addition of a Python number has no
operand that could be marked partial. As a tensor, the number is an operand like any other, and is added once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

SPELLED: dict[Any, tuple[Any, bool]] = {
    aten.add.Scalar: (aten.add.Tensor, False),
    aten.add.Tensor: (aten.add.Tensor, False),
    aten.rsub.Scalar: (aten.sub.Tensor, True),
    aten.sub.Scalar: (aten.sub.Tensor, False),
    aten.sub.Tensor: (aten.sub.Tensor, False),
}
"""Operators with a number as operand -> the operator on tensors, and whether the number comes first."""


def numbers(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: means as quotients.
    does: replaces a number that is added to, or subtracted from, a value of one element on the way to a loss (or the
           other way round) by a tensor of one element.
    gives: additions of tensors, through which partial sums pass. Values on which no loss depends stay as they are."""
    for node in _above_loss(gm):
        if node.target in SPELLED:
            with edit.before(node):
                new = _spelled(node)
            if new is not None:
                edit.replace(node, new)
    return edit.finish(gm)


def _above_loss(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """The calls on which losses depend through values of one element."""
    pairs = zip(edit.output_node(gm).args[0], gm.meta["outputs"], strict=True)  # type: ignore[arg-type]
    pending, found = [value for value, entry in pairs if entry["kind"] == "loss"], dict[fx.Node, None]()
    while pending:
        node = pending.pop()
        if (
            node not in found
            and node.op == "call_function"
            and facts.is_tensor(node)
            and facts.is_float(node)
            and all(size == 1 for size in facts.shape(node))
        ):
            found[node] = None
            pending += edit.tensor_operands(node)
    return found


def _spelled(node: fx.Node) -> fx.Node | None:
    """The same call with a tensor in place of the number; None where there is no number, or `alpha` multiplies it."""
    value, number, *more = node.args
    if more or node.kwargs or not isinstance(number, (int, float)) or isinstance(number, bool):
        return None
    target, first = SPELLED[node.target]
    apart = edit.call(node, aten.full.default, [1] * facts.rank(node), float(number), dtype=facts.dtype(node))
    return edit.call(node, target, *((apart, value) if first else (value, apart)))
