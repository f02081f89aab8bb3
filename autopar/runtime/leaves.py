"""Leaves: the tensors that autograd computes with, made once per step from the parameters at rest (ZeRO-1 and 2, mixed
precision).

A parameter has a leaf of its own where it rests cut and its readers see it whole, or where it is computed with in
another dtype. The leaf is a cast of it, then gathered. This is done at the beginning of every step, and of every
forward without a backward, in flat buckets in the order of use: leaves that are read outside of blocks before the model
(or its stage of a pipeline) runs, those of a block when it is called, while later gathers go on. The stages of a place
follow each other.

A leaf that is cut over several axes takes one collective for each, one after the other. The last collectives of the
leaves of a block begin while the block before it runs, each of the others one block earlier (`prefetching.due`).

Nothing is kept from one step to the next, so a leaf is never stale, whatever has changed the parameter in between: an
optimizer, a checkpoint, or an in-place edit that no version counter shows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autopar._torch import copy_all
from autopar.buckets import BUCKET_BYTES, leaf_buckets
from autopar.layout import Step, crosses, steps
from autopar.prefetching import due
from autopar.runtime.coalesced import Together
from autopar.runtime.lifetimes import weakly
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout
from autopar.runtime.params import Held, filling


class Reader(Protocol):
    """A block, or a stage: its table of leaves, and what it calls before it runs."""

    w: dict[str, Tensor]
    ready: Callable[[], None] | None


@dataclass(eq=False)
class _Bucket:
    """Leaves that are filled by the same collectives. `ways[i]` are the steps of `members[i]`; where it is empty, each
    member is resharded by itself when it is needed. `begun` counts the collectives that have started."""

    members: tuple[Held, ...]
    ways: tuple[tuple[Step, ...], ...]
    begun: int = 0
    moved: Together | None = None

    @property
    def legs(self) -> int:
        """The number of collectives, which run one after the other."""
        return len(self.ways[0]) if self.ways else 0


@dataclass(frozen=True, eq=False)
class Part:
    """A model, or one stage of a pipeline: the leaves of `held` are read by its `blocks`, and outside of them by the
    `stage`, or where that is None by the model itself."""

    held: Iterable[Held]
    stage: Reader | None
    blocks: Sequence[Reader]


class Leaves:
    """Fills the leaves of `parts`, which run in this order; stages and blocks wait for their own when they are
    called."""

    def __init__(self, parts: Iterable[Part], mesh: Mesh, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.mesh, self.buckets, self.before = mesh, list[_Bucket](), -1
        self.until: list[int] = []  # for each bucket, the index behind the last one that its first reader waits for
        for part in parts:
            self._add(part, bucket_bytes)
        self.done = len(self.buckets)
        for index, bucket in enumerate(self.buckets):
            for h in bucket.members:
                h.ready = weakly(self.finish, index)

    def _add(self, part: Part, bucket_bytes: int) -> None:
        """Add the buckets of one of the parts."""
        numbers, begin = owners(part.blocks), len(self.buckets)
        gathered = [h for h in part.held if h.info.apart]
        first = {h.name: min(_readers(h, numbers)) for h in gathered}
        gathered.sort(key=lambda h: first[h.name])
        self.buckets += _buckets(gathered, first, self.mesh, bucket_bytes)
        last = {
            number: index
            for index, bucket in enumerate(self.buckets[begin:], begin)
            for h in bucket.members
            for number in _readers(h, numbers)
        }
        self.until += [last[min(first[h.name] for h in bucket.members)] + 1 for bucket in self.buckets[begin:]]
        if part.stage is None:
            self.before = last.get(-1, -1)
        for number, reader in enumerate((part.stage, *part.blocks), -1):
            if reader is not None and number in last:
                reader.ready = weakly(self.finish, last[number])

    def refresh(self) -> None:
        """Begin to fill all leaves; returns when the model itself can run."""
        self.reset()
        self.done = 0
        self._begin()
        self.finish(self.before)

    def finish(self, index: int) -> None:
        """Wait until the buckets up to `index` are filled."""
        while self.done <= index:
            bucket = self.buckets[self.done]
            self.done += 1
            self._fill(bucket)
            self._begin()

    def reset(self) -> None:
        """Forget the gathers of a step that ended in an error; what runs is waited for, since all ranks take part in
        it."""
        for bucket in self.buckets:
            if bucket.moved is not None:
                bucket.moved.wait()
            bucket.begun, bucket.moved = 0, None

    @torch.no_grad()
    def _begin(self) -> None:
        """Start the collectives that are due (`prefetching.due`)."""
        legs, begun = ([getattr(bucket, name) for bucket in self.buckets] for name in ("legs", "begun"))
        for number in due(legs, self.until, begun, self.done):
            bucket = self.buckets[number]
            bucket.begun += 1
            if bucket.moved is not None:
                bucket.moved.go_on()
                continue
            members = bucket.members
            bucket.moved = Together(
                bucket.ways,
                [h.on_device(h.leaf.dtype) for h in members],
                [h.info.shape for h in members],
                self.mesh,
                [h.name for h in members],
                [h.leaf.detach() for h in members],
            )

    def _fill(self, bucket: _Bucket) -> None:
        """Wait for the leaves of a bucket, or where it has no collectives of its own reshard them one by one."""
        with filling(bucket.members):
            if bucket.moved is not None:
                bucket.moved.finish()
                bucket.moved = None
                return
            wholes = [
                relayout(
                    h.local.detach() if h.info.leaf_entries == h.info.entries else h.on_device(h.leaf.dtype),
                    h.info.entries,
                    h.info.leaf_entries,
                    h.info.shape,
                    self.mesh,
                    h.name,
                )
                for h in bucket.members
            ]
            copy_all([h.leaf for h in bucket.members], wholes)


def owners(blocks: Iterable[Reader]) -> dict[int, int]:
    """The number of each block, by the id of its table of leaves."""
    return {id(block.w): number for number, block in enumerate(blocks)}


def _readers(held: Held, numbers: Mapping[int, int]) -> Iterator[int]:
    """The blocks that read `held`, by number; -1 for what is outside of them."""
    for table, _ in held.readers:
        yield numbers.get(id(table), -1)


def _buckets(held: Sequence[Held], first: Mapping[str, int], mesh: Mesh, limit_bytes: int) -> list[_Bucket]:
    """Buckets in the order of `held`; `first` is the number of the block that reads each first, -1 for what is outside
    of blocks."""

    def alike(h: Held) -> Hashable:
        way = gathered_by(h, mesh)
        return (*(step.axis for step in way), h.leaf.dtype) if way else None

    def reader(h: Held) -> int | None:
        return first[h.name] if first[h.name] >= 0 else None

    found = leaf_buckets(held, alike=alike, reader=reader, nbytes=lambda h: h.leaf_bytes(mesh), limit_bytes=limit_bytes)
    return [_bucket(members, mesh) for members in found]


def _bucket(members: Sequence[Held], mesh: Mesh) -> _Bucket:
    return _Bucket(tuple(members), tuple(way for h in members if (way := gathered_by(h, mesh))))


def gathered_by(held: Held, mesh: Mesh) -> tuple[Step, ...]:
    """The all-gathers that fill the leaf of `held`; none where its way has other steps too."""
    way = steps(held.info.entries, held.info.leaf_entries, mesh.sizes)
    return way if all(step.kind == "all_gather" and crosses(step, mesh.sizes) for step in way) else ()
