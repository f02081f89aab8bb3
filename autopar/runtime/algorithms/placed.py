"""Operator placement: an operator that runs on one coordinate of a mesh axis only, so that branches run side by side.

Under `O1` coordinate 1 holds a value whole and the others hold it empty (layout.py). `placed` computes there and does
no work elsewhere, but stays part of autograd on every rank: the collectives of the backward must be run by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.mesh import Mesh

Like = tuple[Tensor | torch.dtype, tuple[int, ...]]  # where an output's dtype comes from, and its local shape


def placed(
    axis: int, coordinate: int, compute: Callable[[], Any], operands: Sequence[Tensor], *outs: Like, mesh: Mesh
) -> Any:
    """`compute()`, a tensor or a tuple of tensors, on the ranks at `coordinate` of `axis`; as many empty ones on the
    others.

    `outs` has for each output a tensor of the same dtype (or the dtype) and the shape that it has at `coordinate`.
    Elsewhere the gradient of every operand is zero: a part of a sum for operands that all ranks hold, empty for placed
    ones. There all these gradients arrive at once, but one after the other on the ranks that compute; it sets
    `mesh.branches`, so that runtime.gradsync starts reductions in a fixed order.
    """
    mesh.branches = True
    if mesh.coord[axis] == coordinate:
        return compute()
    shapes = [(0, *shape[1:]) for _, shape in outs]
    dtypes = [like if isinstance(like, torch.dtype) else like.dtype for like, _ in outs]
    tracked = [x for x in operands if x.requires_grad] if torch.is_grad_enabled() else []
    if not tracked:
        empty: tuple[Tensor, ...] = tuple(
            torch.empty(s, dtype=d, device=mesh.device) for s, d in zip(shapes, dtypes, strict=True)
        )
    else:
        empty = _Elsewhere.apply(shapes, dtypes, mesh.device, *tracked)
    return empty[0] if len(outs) == 1 else empty


class _Elsewhere(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], device: torch.device, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.about = [(x.shape, x.dtype, x.device) for x in operands]
        outs = tuple(torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True))
        ctx.mark_non_differentiable(*(x for x in outs if not (x.is_floating_point() or x.is_complex())))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.about)
