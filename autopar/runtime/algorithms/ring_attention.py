"""Attention with queries, keys and values all cut along the sequence: keys and values go round the ring of ranks.

Each rank attends its rows to the keys at hand while the next ones are on their way, and merges what it gets
(partial_attention). The backward sends keys and values round once more, with the sums of their gradients behind them
(Ring Attention, https://arxiv.org/abs/2310.01889). On n ranks: n - 1 sends of (k, v) forward; n - 1 of (k, v) and n of
(dk, dv) backward; where causal, one exchange of halves on each way in and out (ring_order). Nothing is kept for the
backward but what the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime.algorithms.partial_attention import attend, attend_backward, merge, wide
from autopar.runtime.algorithms.ring_order import Order, dims_in_memory
from autopar.runtime.mesh import Mesh
from autopar.runtime.neighbours import pack, start_shift, unpack


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    rows: int,
    axes: Sequence[int],
    mesh: Mesh,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """This rank's rows of scaled_dot_product_attention over a sequence of `rows`: `q [..., h, l, d]`, `k [..., g, l,
    d]`, `v [..., g, l, e]`, all cut along l as torch.chunk cuts on the one mesh axis in `axes` -> `[..., h, l, e]`.

    `attn_mask` has this rank's rows (or 1) and all columns (or 1). g is h, or divides it (`enable_gqa`). Uneven and
    empty shards are exact. Raises RunError where `q`, `k` and `v` do not have this rank's rows, or are split by more
    than one axis.
    """
    if len(axes) != 1:
        raise RunError(f"ring attention goes round one mesh axis, got {tuple(axes)} of {mesh}; plan it for one axis")
    order = Order(rows, axes[0], mesh, is_causal)
    local = order.length(order.rank)
    if {q.shape[-2], k.shape[-2], v.shape[-2]} != {local}:
        raise RunError(
            f"ring attention: q, k, v have {q.shape[-2]}, {k.shape[-2]}, {v.shape[-2]} rows, wanted {local}: chunk "
            f"{order.rank} of {order.ways} of a sequence of {rows}"
        )
    out: Tensor = _Ring.apply(q, k, v, attn_mask, order, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, order: Order, scale: float) -> Tensor:
        # as the fused kernels have it: results lie as queries do, and gradients as their operands
        like = [dims_in_memory(x) for x in (q, k, v)]
        q, k, v = order.enter([q, k, v])
        total = torch.empty_permuted(
            (*q.shape[:-1], v.shape[-1]), dims_in_memory(q), dtype=wide(q.dtype), device=q.device
        ).zero_()
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=total.dtype)
        for source, (key, value) in _round(order, [k, v]):
            for rows, keys, causal in order.tiles(source):
                part = attend(
                    q[..., rows, :],
                    key[..., keys, :],
                    value[..., keys, :],
                    _columns(mask, order, source),
                    causal,
                    scale,
                )
                merge(total[..., rows, :], lse[..., rows], *part)
                del part
            del key, value
        (out,) = order.leave([total.to(q.dtype)], like[:1])
        ctx.save_for_backward(q, k, v, out, lse, *(() if mask is None else (mask,)))
        ctx.order, ctx.scale, ctx.like = order, scale, like
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        order: Order = ctx.order
        mask = masks[0] if masks else None
        grad, out = order.enter([grads[0].contiguous(), out])
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dmask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        passed = None  # sums of the ranks before, for the keys at hand
        for source, (key, value) in _round(order, [k, v]):
            sums = lse.new_zeros(key.numel() + value.numel())
            dk, dv = unpack(sums, [key.shape, value.shape])
            for rows, keys, causal in order.tiles(source):
                parts = attend_backward(
                    grad[..., rows, :],
                    q[..., rows, :],
                    key[..., keys, :],
                    value[..., keys, :],
                    out[..., rows, :],
                    lse[..., rows],
                    _columns(mask, order, source),
                    causal,
                    ctx.scale,
                )
                for whole, part, at in ((dq, parts[0], rows), (dk, parts[1], keys), (dv, parts[2], keys)):
                    whole[..., at, :] += part
                if dmask is not None and parts[3] is not None:
                    _columns(dmask, order, source).add_(parts[3])
                del parts, part
            del key, value, dk, dv
            if passed is not None:
                sums += passed()
            if order.ways > 1:
                passed = start_shift(
                    sums, _numel([k, v], order, (source - 1) % order.ways), order.axis, order.mesh, order.name
                )
        del grad, out
        if passed is not None:
            sums = passed()
            del passed
        dq, dk, dv = order.leave([x.to(q.dtype) for x in (dq, *unpack(sums, [k.shape, v.shape]))], ctx.like)
        return dq, dk, dv, dmask, None, None


def _round(order: Order, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Every rank's `tensors` with that rank, the own ones first, then those of the ranks before; the next are under way
    meanwhile."""
    held, source = pack(tensors), order.rank
    for step in range(order.ways):
        before = (source - 1) % order.ways
        arrive = (
            start_shift(held, _numel(tensors, order, before), order.axis, order.mesh, order.name)
            if step < order.ways - 1
            else None
        )
        yield source, unpack(held, _shapes(tensors, order, source))
        if arrive is not None:
            held, source = arrive(), before


def _shapes(tensors: Sequence[Tensor], order: Order, source: int) -> list[tuple[int, ...]]:
    """The shapes that `tensors` have on rank `source`."""
    return [(*x.shape[:-2], order.length(source), x.shape[-1]) for x in tensors]


def _numel(tensors: Sequence[Tensor], order: Order, source: int) -> int:
    return sum(math.prod(shape) for shape in _shapes(tensors, order, source))


def _columns(mask: Any, order: Order, source: int) -> Any:
    """The part of a mask that speaks of the keys of `source`."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    start, stop = order.span(source)
    return mask[..., start:stop]
