"""Dropout on shards: the same mask on replicas, another one on every shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.mesh import Mesh
from autopar.runtime.rng import current, generator


def dropout(x: Tensor, p: float, layout: str, *, key: str, mesh: Mesh, once: bool = False) -> Tensor:
    """`x` with each element zeroed with probability `p` and the rest scaled by 1 / (1 - p): same shape. As it is where
    the module evaluates.

    `layout` says which ranks hold the same shard (they draw the same mask); `key` names the operator. Reproducible by
    seed, and new at every step, in every block and microbatch (in all the same with `once`) and at every call
    (autopar.runtime.rng). The mask is one draw per element, as on one device, but other numbers.
    """
    if p == 0.0 or not current().training:
        return x
    if p == 1.0:
        return x * 0.0
    drawn = generator(key, layout, mesh, x.device, once=once)
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - p, generator=drawn)
    dropped: Tensor = _Masked.apply(x, kept, 1.0 / (1.0 - p))
    return dropped


class _Masked(torch.autograd.Function):
    """What is kept, scaled. Autograd keeps the mask, a byte for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return _scaled(x, kept, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scaled(grads[0], ctx.saved_tensors[0], ctx.scale), None, None


def _scaled(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """`x * kept * scale`, allocating only the result. torch has one kernel for it, the backward of dropout. On a CPU
    that is three operators, whose two intermediate results would exist beside the last one; here all write to the same
    memory, with the same numbers."""
    if x.device.type == "cpu":
        return torch.empty_like(x).copy_(kept).mul_(x).mul_(scale)
    scaled: Tensor = torch.ops.aten.native_dropout_backward(x, kept, scale)
    return scaled
