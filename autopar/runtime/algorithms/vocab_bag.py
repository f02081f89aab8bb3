"""Bags of rows of a table whose rows are split: each rank adds up what it has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.mesh import Mesh


def vocab_bag(
    table: Tensor,
    chosen: Tensor,
    gates: Tensor | None = None,
    mode: str = "sum",
    padding: int = -1,
    *,
    vocab: int,
    axes: Sequence[int],
    mesh: Mesh,
) -> Tensor:
    """`table [v_local, d]` this rank's rows of all `vocab`, `chosen [..., n]` of all -> `[..., d]`, a partial sum over
    `axes` of what `passes.ops.bag` gives; nan for bags with a number of no row, for which one device has an error.

    `mode` is "sum" or "mean"; row `padding` (-1: none) counts nothing. The gradient that comes back must be whole on
    `axes`, that of `gates` is a part of a sum. Uneven and empty shards are exact. No communication.
    """
    dtype = table.dtype if gates is None else torch.promote_types(table.dtype, gates.dtype)
    start, stop = mesh.span(vocab, axes)
    if start == stop:
        table, here = table.new_zeros(1, table.shape[1]) + table.sum(), torch.zeros_like(chosen, dtype=torch.bool)
    else:
        here = (chosen >= start) & (chosen < stop)
    counted = chosen != padding
    weights = (here & counted).to(dtype) * (1 if gates is None else gates)
    # to raise an error would be to wait for the device
    weights = weights.masked_fill((chosen < 0) | (chosen >= vocab), math.nan)
    if mode == "mean":
        weights = weights / counted.sum(-1, keepdim=True).clamp(min=1)
    rows = (chosen - start).where(here, 0).reshape(-1, chosen.shape[-1])
    found = F.embedding_bag(
        rows, table.to(dtype), mode="sum", per_sample_weights=weights.reshape(-1, chosen.shape[-1]).to(dtype)
    )
    return found.view(*chosen.shape[:-1], table.shape[1])
