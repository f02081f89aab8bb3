"""Whole gradients of ZeRO-1 and 2 on their way to where their parameters rest: bucket by bucket, as runtime.gradsync sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.layout import BUCKET_BYTES
from autopar.memory.book import Book, Storage


@dataclass(eq=False)
class Buckets:
    """A flat copy of a bucket is there until its scatter is waited for: when a later block has begun others behind it (runtime.late). `staged`: another one while
    it runs, that gloo sums in; scatters run one by one."""

    book: Book
    staged: bool
    filling: dict[Hashable, list[Storage]] = field(default_factory=dict)
    running: deque[tuple[Storage, object]] = field(default_factory=deque)

    def add(self, together: Hashable, gradient: Storage, unit: object) -> None:
        """One more gradient is there, of the block `unit`; those that go `together` are in one bucket, which begins when it is full."""
        members = self.filling.setdefault(together, [])
        members.append(gradient)
        if sum(member.nbytes for member in members) >= BUCKET_BYTES:
            self._begin(self.filling.pop(together), unit)

    def drain(self) -> None:
        """The backward is over: those that are not full begin, and all end."""
        for members in self.filling.values():
            self._begin(members, object())
        self.filling = {}
        for flat, _ in self.running:
            self.book.use(flat)

    def _begin(self, members: list[Storage], unit: object) -> None:
        """A bucket is copied and sent; those of earlier blocks are waited for when others have begun behind them."""
        for member in members:
            self.book.use(member)
        first, nbytes = members[0], sum(member.nbytes for member in members)
        self.running.append((self.book.new("whole gradients", first.node, first.where, nbytes), unit))
        if self.staged:
            self.book.new("temporaries", first.node, first.where, nbytes)
        while self.running[0][1] != unit and sum(flat.nbytes for flat, _ in self.running) - self.running[0][0].nbytes > BUCKET_BYTES:
            self.book.use(self.running.popleft()[0])
