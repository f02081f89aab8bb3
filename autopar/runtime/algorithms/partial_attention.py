"""Attention of some queries over some of their keys, and how such parts become the whole.

    out_i = sum over j of p_ij v_j / sum over j of p_ij,     p_ij = exp(scale q_i . k_j + mask_ij)
    lse_i = log(sum over j of p_ij)

Over two parts of the keys lse = log(exp(lse_1) + exp(lse_2)) and out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2.
In the backward each part needs only the whole `out` and `lse` (FlashAttention, https://arxiv.org/abs/2205.14135,
appendix B).

Fused kernels run where the device has them, matmuls over all pairs elsewhere (masks, values of another width than
keys).
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar._torch import flash_attention, flash_attention_backward, flash_takes

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added up: float32, for float64 and complex numbers that itself."""
    return torch.promote_types(dtype, torch.float32)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`q [..., h, l, d]`, `k [..., g, s, d]`, `v [..., g, s, e]` with g dividing h -> the attention `[..., h, l, e]`
    and its log-sum-exp `[..., h, l]`, -inf for rows that see nothing, whose result is 0. Neither l nor s may be 0. No
    autograd.

    `mask` is boolean (True: seen) or added; `causal` hides key j from row i < j and wants l = s.
    """
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if mask is None and flash_takes(q, k, v, causal):
        out, lse = flash_attention(_batched(q), _batched(k), _batched(v), causal, scale)
        return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ v.to(lse.dtype), lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Grads:
    """Gradients of q, k, v and a floating mask that come from this part; `out` and `lse` are those over all keys."""
    groups, k, v = k.shape[-3] if k.dim() > 2 else 1, repeat_heads(k, q), repeat_heads(v, q)
    if mask is None and flash_takes(q, k, v, causal):
        dq, dk, dv = flash_attention_backward(
            _batched(grad),
            _batched(q),
            _batched(k),
            _batched(v),
            _batched(out),
            _batched(lse.unsqueeze(-1)).squeeze(-1),
            causal,
            scale,
        )
        return (
            dq.reshape(q.shape),
            _sum_groups(dk.reshape(k.shape), groups),
            _sum_groups(dv.reshape(v.shape), groups),
            None,
        )
    weights = _weights(_scores(q, k, mask, causal, scale), lse)
    grad = grad.to(weights.dtype)
    delta = (grad * out.to(weights.dtype)).sum(-1, keepdim=True)
    scores = weights * (grad @ v.to(weights.dtype).mT - delta)
    dmask = scores.sum_to_size(mask.shape) if mask is not None and mask.is_floating_point() else None
    dk, dv = scale * (scores.mT @ q.to(scores.dtype)), weights.mT @ grad
    return scale * (scores @ k.to(scores.dtype)), _sum_groups(dk, groups), _sum_groups(dv, groups), dmask


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the attention over more keys to `out [..., l, e]` and `lse [..., l]`, in place; all in the wide dtype."""
    total = torch.logaddexp(lse, part_lse)
    seen = total > -torch.inf
    old, new = ((x - total).exp().where(seen, 0.0).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(total)


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """One head of keys or values for each head of `q`."""
    if q.dim() < 3 or x.shape[-3] == q.shape[-3]:
        return x
    return x.unsqueeze(-3).expand(*x.shape[:-2], q.shape[-3] // x.shape[-3], *x.shape[-2:]).flatten(-4, -3)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    """The gradient of what `repeat_heads` repeated."""
    return (
        grad
        if grad.dim() < 3 or grad.shape[-3] == groups
        else grad.unflatten(-3, (groups, -1)).sum(-3, dtype=wide(grad.dtype))
    )


def _batched(x: Tensor) -> Tensor:
    """`[batch, heads, rows, features]`, as fused kernels want it."""
    return x.reshape(-1, x.shape[-3] if x.dim() > 2 else 1, *x.shape[-2:]).contiguous()


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q.to(wide(q.dtype)) @ k.to(wide(q.dtype)).mT) * scale
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); zeros for rows that see nothing."""
    return (scores - lse.where(lse > -torch.inf, 0.0).unsqueeze(-1)).exp()
