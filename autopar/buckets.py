"""Buckets: which weights share a collective. Gradients that are summed over ranks, and leaves that are gathered once
per step, travel together in flat buffers, large enough to fill a link.

One rule, shared by what runs (runtime.gradient_buckets, runtime.leaves, runtime.coalesced), its simulation
(simulate.sync), its price (problem.routes, pipeline.clock, pipeline.pass_clock, pipeline.stops) and its memory
(memory.buckets, memory.sums).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

Part = TypeVar("Part")

BUCKET_BYTES = 25_000_000
"""About so many bytes are in a full bucket, as in torch's DistributedDataParallel (bucket_cap_mb=25)."""
PACKED = ("all_gather", "all_reduce", "reduce_scatter")
"""Kinds of steps that tensors take together in buckets; a tensor that takes any other goes its whole way by itself."""
SOON = 0.1
"""Share of the limit of bytes in flight: a collective that is not the first of its chain is started only once so many
bytes are ready for it, so that small tensors take it together. Otherwise many small collectives would each wait for the
one before, and compute for them (autopar.prefetching, autopar.deferred_waits)."""


def full(nbytes: float, limit_bytes: float = BUCKET_BYTES) -> bool:
    """Whether a bucket of `nbytes` takes no more tensors."""
    return nbytes >= limit_bytes


def travels_alone(nbytes: float, limit_bytes: float = BUCKET_BYTES) -> bool:
    """Whether a tensor that would fill a bucket has collectives of its own: to pack it takes longer than to start
    these. `nbytes` are those on a rank at that end of its way where it is larger."""
    return full(nbytes, limit_bytes)


def gradient_buckets(
    gradients: Iterable[Part],
    *,
    alike: Callable[[Part], Hashable],
    nbytes: Callable[[Part], float],
    limit_bytes: float = BUCKET_BYTES,
) -> list[list[Part]]:
    """Gradients, in the order in which the backward reaches them, in buckets: first the full ones, as they fill up.
    Those that are `alike` (the same collectives and dtype) share one, whatever comes between them."""
    filling, filled_bytes = dict[Hashable, list[Part]](), dict[Hashable, float]()
    found: list[list[Part]] = []
    for gradient in gradients:
        key = alike(gradient)
        filling.setdefault(key, []).append(gradient)
        filled_bytes[key] = filled_bytes.get(key, 0.0) + nbytes(gradient)
        if full(filled_bytes[key], limit_bytes):
            found.append(filling[key])
            filling[key], filled_bytes[key] = [], 0.0
    return found + [members for members in filling.values() if members]


def shared_by_places(holders: Mapping[str, Iterable[int]]) -> dict[tuple[int, ...], list[str]]:
    """Of weights with the places of a pipeline that hold them, those that several hold, by these places: the groups of
    ranks that sum their gradients."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, places in holders.items():
        if len(where := tuple(sorted(set(places)))) > 1:
            found.setdefault(where, []).append(name)
    return found


def leaf_buckets(
    leaves: Iterable[Part],
    *,
    alike: Callable[[Part], Hashable],
    reader: Callable[[Part], Hashable],
    nbytes: Callable[[Part], float],
    limit_bytes: float = BUCKET_BYTES,
) -> list[list[Part]]:
    """Leaves, in the order in which they are read, in buckets of successive ones that are `alike` (the same collectives
    and dtype).

    `reader` is the block that reads a leaf first, None outside of blocks. A block begins a bucket where the current one
    is half full, since it waits for all of a bucket, or has leaves from outside of blocks, which are waited for before
    the first block.
    """
    found: list[list[Part]] = []
    filled_bytes = 0.0
    for leaf in leaves:
        joins = bool(found) and alike(found[-1][-1]) == alike(leaf) and not full(filled_bytes, limit_bytes)
        if joins and (before := reader(found[-1][-1])) != reader(leaf):
            joins = before is not None and not full(2 * filled_bytes, limit_bytes)
        if not joins:
            found.append([])
            filled_bytes = 0.0
        found[-1].append(leaf)
        filled_bytes += nbytes(leaf)
    return found
