"""Storages (the memory of tensors), and the times at which they are alive. A time is one step of the walk: an operator
or a change of layout. Used by memory.forward and memory.backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autopar.memory.types import Entry


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of one tensor (or of `count` alike ones), alive at the times `born` to `last`."""

    kind: str
    node: str
    where: str
    nbytes: float
    born: int
    last: int
    count: int = 1
    regathered: bool = False  # the backward gathers it again, so that keeping it costs nothing
    # where it is gathered by collectives one after the other, what each of them takes: 0 of what rests
    takes: tuple[float, ...] = ()
    # what a kernel read that makes it in registers, or what it is gathered from: kept in its place
    sources: tuple[Storage, ...] = ()

    def alive(self, time: int) -> bool:
        """Whether it is alive at a time."""
        return self.born <= time <= self.last

    @property
    def real(self) -> tuple[Storage, ...]:
        """The storages that must be kept to have this one: itself, or its sources where these are kept instead."""
        return self.sources or (self,)

    @property
    def total(self) -> float:
        """Bytes of all `count` tensors."""
        return self.nbytes * self.count


@dataclass(eq=False)
class Book:
    """All storages of a walk; `labels[time]` says what happens at a time."""

    storages: list[Storage] = field(default_factory=list)
    labels: list[str] = field(default_factory=lambda: ["the start"])

    @property
    def now(self) -> int:
        """The time of the last step."""
        return len(self.labels) - 1

    def step(self, label: str) -> None:
        """Begin the next step."""
        self.labels.append(label)

    def new(self, kind: str, node: str, where: str, nbytes: float, count: int = 1) -> Storage:
        """A storage that is allocated now."""
        made = Storage(kind, node, where, nbytes, self.now, self.now, count)
        self.storages.append(made)
        return made

    def like(self, other: Storage, born: int, count: int = 1) -> Storage:
        """A storage like `other` for `count` other instances of a block, allocated at `born`."""
        made = replace(other, born=born, last=born, count=count, sources=())
        self.storages.append(made)
        return made

    def use(self, storage: Storage | None) -> None:
        """Extend the life of a storage to now (None: it rests, and is not counted here)."""
        if storage is not None:
            storage.last = max(storage.last, self.now)
            for source in storage.sources:
                source.last = max(source.last, self.now)

    def totals(self) -> np.ndarray:
        """Bytes alive at each time."""
        change = np.zeros(len(self.labels) + 1)
        for storage in self.storages:
            change[storage.born] += storage.total
            change[storage.last + 1] -= storage.total
        return np.cumsum(change)[:-1]

    def entry(self, storage: Storage) -> Entry:
        """The storage as an entry of the report."""
        return Entry(
            storage.kind,
            storage.node,
            storage.where,
            storage.total,
            storage.count,
            self.labels[storage.born],
            self.labels[storage.last],
        )
