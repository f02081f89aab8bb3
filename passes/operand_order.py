"""Products that permute their operands for one batched matmul: where the permutation is no view, autograd keeps a copy.
Used by annotate_memory and rules.

einsum("becd,edh->bech", x, w)      x as [e, b c, d] is a copy, w as [e, d, h] is a view
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from passes import edit, facts, ops

aten = torch.ops.aten

BIASED = (aten.linear.default, ops.affine)
ORDERED = (aten.einsum.default, aten.matmul.default, *BIASED)
"""Products of two tensors (those in BIASED maybe with a bias) whose kernel permutes operands first."""


def copied(node: fx.Node, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the operands at `positions`, those that autograd keeps for the backward of the product `node`, are kept
    as copies (permuted, and not views). torch is run at example sizes to find out. Each operand is kept for the
    gradient of the other one."""
    operands = edit.tensor_operands(node)
    if node.target not in ORDERED or len(operands) > 2 + (node.target in BIASED):
        return ()
    tensors = [
        _alike(node, operand).requires_grad_(position < 2 and 1 - position in positions)
        for position, operand in enumerate(operands)
    ]
    kept: list[Tensor] = []
    queue: Iterator[Tensor] = iter(tensors)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        node.target(*fx.map_arg(node.args, lambda _: next(queue)))
    storages = [tensor.untyped_storage() for tensor in kept]
    return tuple(
        position
        for position in positions
        if not any(tensors[position].untyped_storage() is storage for storage in storages)
    )


def _alike(node: fx.Node, operand: fx.Node) -> Tensor:
    """A tensor on meta with the sizes and strides of `operand`, at example sizes."""
    (held,) = facts.tensors(operand)
    sizes, strides = ([facts.example(node, size) for size in numbers] for numbers in (held.shape, held.stride()))
    return torch.empty_strided(sizes, strides, dtype=held.dtype, device="meta")
