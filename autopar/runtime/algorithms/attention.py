"""Attention with dropout on shards: replicas drop the same weights, shards different ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.layout import parse
from autopar.runtime.mesh import Mesh
from autopar.runtime.rng import current


def attention(q: Tensor, k: Tensor, v: Tensor, layout: str, *, key: str, mesh: Mesh, **options: Any) -> Tensor:
    """scaled_dot_product_attention whose random numbers follow from this module's seed: `q [..., h, t, d]` -> the same shape.

    torch's kernel draws from the default generator, which ranks share only by accident; here it is seeded for this one call
    by (seed, step, `key`, the shard that this rank holds under `layout`), and put back after. `options` go to the kernel.
    """
    seed = current().generator(key, parse(layout), mesh.coord, torch.device("cpu")).initial_seed()
    devices = [q.device] if q.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(q, k, v, **options)
