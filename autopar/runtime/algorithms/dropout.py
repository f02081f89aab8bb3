"""Dropout on shards: the same mask on replicas, another one on every shard."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.layout import parse
from autopar.runtime.mesh import Mesh
from autopar.runtime.rng import current


def dropout(x: Tensor, p: float, layout: str, *, key: str, mesh: Mesh) -> Tensor:
    """`x` with each element zeroed with probability `p` and the rest scaled by 1 / (1 - p): same shape. As it is where the module evaluates.

    `layout` says which ranks hold the same shard (they draw the same mask); `key` names the operator. Reproducible by seed, and
    new at every step and every call (autopar.runtime.rng). The mask is one draw per element, as on one device, but other numbers.
    """
    if p == 0.0 or not current().training:
        return x
    if p == 1.0:
        return x * 0.0
    generator = current().generator(key, parse(layout), mesh.coord, x.device)
    keep = torch.empty(x.shape, dtype=torch.float32, device=x.device).uniform_(generator=generator) >= p
    return x * keep.to(x.dtype) / (1.0 - p)
