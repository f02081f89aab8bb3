"""Random operators on shards: replicas draw the same numbers, shards different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from autopar.runtime.mesh import Mesh
from autopar.runtime.rng import generator

T = TypeVar("T")


def seeded(draw: Callable[[], T], layout: str, *, key: str, mesh: Mesh, once: bool = False) -> T:
    """`draw()`, with torch's default generator seeded for this one call and put back after.

    Ranks share the default generator only by accident. The seed follows from (module seed, step, `key`, the shard that
    this rank holds under `layout`) and from where it is drawn, as in autopar.runtime.rng; with `once` all microbatches
    have the same.
    """
    seed = generator(key, layout, mesh, torch.device("cpu"), once=once).initial_seed()
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return draw()
