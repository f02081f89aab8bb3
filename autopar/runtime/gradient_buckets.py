"""Buckets: which gradients are reduced together, and in which order reductions start (runtime.gradsync)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.buckets import PACKED, gradient_buckets
from autopar.layout import Step, steps
from autopar.runtime.coalesced import Together
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced together. `moves` are the collectives, (kind, axis) in order; `block` is
    the number of the block whose backward completes the bucket, None outside of blocks; `ready` are the members whose
    gradient has arrived; `sums` is the reduction once it has started."""

    moves: tuple[tuple[str, int], ...]
    members: tuple[Held, ...]
    block: int | None = None
    ready: list[Held] = field(default_factory=list)
    sums: Together | None = None


def sync_steps(held: Held, mesh: Mesh) -> tuple[Step, ...]:
    """The steps from the gradient of the leaf of `held` to the layout at rest: what is priced, run and counted."""
    return tuple(
        step for step in steps(held.info.partial_grad, held.info.entries, mesh.sizes) if mesh.sizes[step.axis] > 1
    )


def buckets_of(held: Sequence[Held], mesh: Mesh, limit_bytes: int) -> list[Bucket]:
    """Buckets in the order in which a backward fills them: parameters in reverse, those of a bucket with the same
    collectives, dtype and `each`."""
    moves = {h.name: tuple((step.kind, step.axis) for step in sync_steps(h, mesh)) for h in held}
    found = gradient_buckets(
        [
            h
            for h in reversed(held)
            if h.leaf.requires_grad and moves[h.name] and all(kind in PACKED for kind, _ in moves[h.name])
        ],
        alike=lambda h: (moves[h.name], h.local.dtype, h.info.each),
        nbytes=lambda h: h.gradient_bytes(mesh),
        limit_bytes=limit_bytes,
    )
    return [Bucket(moves[members[0].name], tuple(members)) for members in found]


def turns_of(held: Sequence[Held], buckets: Sequence[Bucket]) -> list[Bucket | Held]:
    """Buckets, and parameters that are reduce-scattered by themselves, in the order in which a backward reaches the
    last member of each."""
    at, summed = (
        {h.name: number for number, h in enumerate(reversed(held))},
        {h.name for bucket in buckets for h in bucket.members},
    )
    turns: list[Bucket | Held] = [
        *buckets,
        *(h for h in held if h.name not in summed and h.info.partial_grad != h.info.entries),
    ]
    return sorted(
        turns, key=lambda turn: max(at[h.name] for h in (turn.members if isinstance(turn, Bucket) else (turn,)))
    )
