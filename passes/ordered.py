"""Products of several dims, which put operands into the order of one batched product: where that is no view, autograd keeps the copy.

    einsum("becd,edh->bech", x, w)      x as [e, b c, d] is a copy, w as [e, d, h] is a view
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from passes import edit, facts

aten = torch.ops.aten

ORDERED = (aten.einsum.default,)
"""Ops of two tensors that are reordered in front of the kernel."""


def copied(node: fx.Node, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the operands at `positions`, which the backward of the product `node` keeps, that it keeps as copies of its own."""
    operands = edit.tensor_operands(node)
    if node.target not in ORDERED or len(operands) != 2:
        return ()
    return tuple(position for position in positions if _is_copied(node, operands, position))


def _is_copied(node: fx.Node, operands: list[fx.Node], position: int) -> bool:
    """Ask torch, at example sizes: what is kept for the gradient of the other operand alone is no view of this one."""
    tensors = [_alike(node, operand) for operand in operands]
    tensors[1 - position].requires_grad_()
    kept: list[Tensor] = []
    queue: Iterator[Tensor] = iter(tensors)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        node.target(*fx.map_arg(node.args, lambda _: next(queue)))  # type: ignore[operator]
    return not any(tensor.untyped_storage() is tensors[position].untyped_storage() for tensor in kept)


def _alike(node: fx.Node, operand: fx.Node) -> Tensor:
    """A tensor without memory that lies as `operand` does."""
    (held,) = facts.tensors(operand)
    sizes, strides = ([facts.example(node, size) for size in numbers] for numbers in (held.shape, held.stride()))
    return torch.empty_strided(sizes, strides, dtype=held.dtype, device="meta")
