"""Embedding with the rows of the table split: each rank looks up what it has, the others give zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.mesh import Mesh


def vocab_embedding(
    ids: Tensor, weight: Tensor, padding_idx: int = -1, *, vocab: int, axes: Sequence[int], mesh: Mesh
) -> Tensor:
    """`ids [...]` of all `vocab` rows, `weight [v_local, h]` this rank's rows -> `[..., h]`, a partial sum over `axes`;
    nan for ids of no row, for which one device has an error.

    Row `padding_idx` (-1: none) gets no gradient. The gradient that comes back must be whole on `axes`. Uneven and
    empty shards are exact. No communication.
    """
    start, stop = mesh.span(vocab, axes)
    if start == stop:
        return F.embedding(ids * 0, weight.new_zeros(1, weight.shape[1])) + weight.sum()
    here = (ids >= start) & (ids < stop)
    padding = padding_idx - start if start <= padding_idx < stop else None
    rows = F.embedding((ids - start).where(here, 0), weight, padding_idx=padding)
    # to raise an error would be to wait for the device
    counted = here.to(weight.dtype).masked_fill((ids < 0) | (ids >= vocab), math.nan)
    return rows * counted.unsqueeze(-1)
