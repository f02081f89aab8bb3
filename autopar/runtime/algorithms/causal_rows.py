"""Causal attention with the query rows split: each rank takes the keys that its rows may see, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.algorithms.partial_attention import repeat_heads
from autopar.runtime.mesh import Mesh


def causal_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rows: int,
    axes: Sequence[int],
    mesh: Mesh,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """`q [..., h, t_local, d]`, this rank's rows of `rows`, which may be more or fewer than keys; whole `k, v [..., s,
    d]` -> `[..., h, t_local, d]`.

    Row i of the whole sees keys 0 ... i, as is_causal of scaled_dot_product_attention. The gradients of k and v are
    partial sums over `axes`. No communication; rank r of n does (2r + 1) / n^2 of the work of the whole, so the last
    one sets the pace.
    """
    start, stop = mesh.span(rows, axes)
    seen = min(max(stop, 1), k.shape[-2])
    if start == 0:
        return F.scaled_dot_product_attention(
            q,
            k[..., :seen, :],
            v[..., :seen, :],
            dropout_p=dropout_p,
            is_causal=True,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa and q.device.type == "cuda":  # no fused kernel there takes both groups and a mask
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    row = torch.arange(start, stop, device=q.device).unsqueeze(-1)
    visible = torch.arange(seen, device=q.device) <= row
    return F.scaled_dot_product_attention(
        q,
        k[..., :seen, :],
        v[..., :seen, :],
        attn_mask=visible,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
    )
