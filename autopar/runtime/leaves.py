"""From what rests to the leaves that autograd computes with, once per step (ZeRO-1 and 2, mixed precision).

A parameter that rests cut and is whole for its readers, or that is computed with in another dtype, has a leaf of its own: it is cast, then gathered. At the begin of every step, and of every forward without a
backward, all such leaves are gathered, in flat buckets in the order of use: those that the model itself reads before it runs, those of a block
when it is called, while the gathers behind it go on. Nothing is remembered from one step to the next, so a leaf is never stale, whatever has
changed the parameter in between: an optimizer, a checkpoint, an edit in place that no version counter shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.layout import BUCKET_BYTES, LEAVES_AHEAD, Step, steps
from autopar.runtime.count import counting, record
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout, step_bytes
from autopar.runtime.params import Held
from autopar.runtime.together import Finish, start


class Reader(Protocol):
    """A block: its table of leaves, and what it calls before it runs."""

    w: dict[str, Tensor]
    ready: Callable[[], None] | None


@dataclass(eq=False)
class _Bucket:
    """Leaves that one collective fills, by `step` for each; without steps each is moved by itself when it is needed."""

    members: tuple[Held, ...]
    steps: tuple[Step, ...]
    finish: Finish | None = None


class Leaves:
    """Fills the leaves of `held`; `blocks` wait for their own when they are called."""

    def __init__(self, held: Iterable[Held], blocks: Iterable[Reader], mesh: Mesh, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.mesh = mesh
        blocks = list(blocks)
        owners = {id(block.w): number for number, block in enumerate(blocks)}
        gathered = [h for h in held if h.info.apart]
        first = {h.name: min(owners.get(id(table), -1) for table, _ in h.readers) for h in gathered}  # -1: the model itself
        gathered.sort(key=lambda h: first[h.name])
        self.buckets = list(_buckets(gathered, first, mesh, bucket_bytes))
        self.done = self.begun = len(self.buckets)
        last = {number: index for index, bucket in enumerate(self.buckets) for h in bucket.members for number in _readers(h, owners)}
        self.before = last.get(-1, -1)
        for index, bucket in enumerate(self.buckets):
            for h in bucket.members:
                h.ready = partial(self.finish, index)
        for number, block in enumerate(blocks):
            if number in last:
                block.ready = partial(self.finish, last[number])

    def refresh(self) -> None:
        """Begin to fill all leaves; returns when the model itself can run."""
        self.reset()
        self.done = self.begun = 0
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
        """Forget the gathers of a step that ended in an error."""
        for bucket in self.buckets:
            bucket.finish = None
        self.done = self.begun = len(self.buckets)

    def _begin(self) -> None:
        while self.begun < min(len(self.buckets), self.done + LEAVES_AHEAD):
            bucket = self.buckets[self.begun]
            self.begun += 1
            if bucket.steps:
                with torch.no_grad():
                    bucket.finish = start(bucket.steps, [h.on_device(h.leaf.dtype) for h in bucket.members], [h.info.shape for h in bucket.members], self.mesh)
                self._count(bucket)

    def _count(self, bucket: _Bucket) -> None:
        if counting():
            for held, step in zip(bucket.members, bucket.steps, strict=True):
                record(step.kind, step.axis, step_bytes(step, held.info.shape, held.leaf.element_size(), self.mesh), held.name)

    def _fill(self, bucket: _Bucket) -> None:
        if bucket.finish is not None:
            wholes: Sequence[Tensor] = bucket.finish()
            bucket.finish = None
        else:
            with torch.no_grad():
                wholes = [relayout(h.local.detach() if h.info.leaf_entries == h.info.entries else h.on_device(h.leaf.dtype), h.info.entries, h.info.leaf_entries, h.info.shape, self.mesh, h.name) for h in bucket.members]
        for held, whole in zip(bucket.members, wholes, strict=True):
            held.fill(partial(_copy, whole))


def _copy(whole: Tensor, leaf: Tensor) -> Any:
    return leaf.copy_(whole)


def _readers(held: Held, owners: Mapping[int, int]) -> Iterator[int]:
    """The blocks that read `held`, by number; -1 for the model itself."""
    for table, _ in held.readers:
        yield owners.get(id(table), -1)


def _buckets(held: Sequence[Held], first: Mapping[str, int], mesh: Mesh, limit_bytes: int) -> Iterator[_Bucket]:
    """Buckets in the order of `held`, apart by axis and dtype; a block starts a new one where the last is half full."""
    filling: list[Held] = []
    key: Any = None
    for h in held:
        step = gather_step(h, mesh)
        here = (step.axis, h.leaf.dtype) if step is not None else None
        size = sum(m.leaf.numel() * m.leaf.element_size() for m in filling)
        new_reader = bool(filling) and first[filling[-1].name] != first[h.name]
        if filling and (here != key or size >= limit_bytes or (new_reader and (2 * size >= limit_bytes or first[filling[-1].name] < 0))):
            yield _bucket(filling, mesh)
            filling = []
        filling.append(h)
        key = here
    if filling:
        yield _bucket(filling, mesh)


def _bucket(members: Sequence[Held], mesh: Mesh) -> _Bucket:
    found = [gather_step(h, mesh) for h in members]
    return _Bucket(tuple(members), tuple(step for step in found if step is not None))


def gather_step(held: Held, mesh: Mesh) -> Step | None:
    """The one collective that fills the leaf of `held`, None where it takes none or several."""
    way = steps(held.info.entries, held.info.leaf_entries, mesh.sizes)
    return way[0] if len(way) == 1 and way[0].kind == "all_gather" and mesh.sizes[way[0].axis] > 1 else None
