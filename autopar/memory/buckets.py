"""Whole gradients on their way to where their parameters rest; those of ZeRO-1 and 2 bucket by bucket, as
runtime.gradsync sends them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from autopar.deferred_waits import Queue
from autopar.layout import BUCKET_BYTES
from autopar.memory.storages import Book, Storage


class Whole:
    """A whole gradient, or a flat copy of a bucket of them: what the collective that runs takes (`held`), and what it
    brings where others follow (`coming`), with the bytes of what these bring."""

    def __init__(self, book: Book, held: Storage, halfway: Sequence[float] = ()) -> None:
        self.book = book
        self._runs(held, halfway)

    @property
    def nbytes(self) -> float:
        """Bytes that are there until the collective is over."""
        return self.held.nbytes

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.coming is not None

    def go_on(self) -> bool:
        """The collective is over, and the next one runs if there is one."""
        self.wait()
        if self.coming is None:
            return False
        self._runs(self.coming, self.halfway)
        return True

    def wait(self) -> None:
        """The collective is over."""
        self.book.use(self.held)

    def _runs(self, held: Storage, halfway: Sequence[float]) -> None:
        self.held, self.halfway = held, halfway[1:]
        self.coming = self.book.new(held.kind, held.node, held.where, halfway[0]) if halfway else None


@dataclass(eq=False)
class Buckets:
    """A flat copy of a bucket is there until its scatter is waited for: when a later block has begun others behind it
    (autopar.deferred_waits). `staged`: another one while it runs, that gloo sums in; scatters run one by one."""

    book: Book
    staged: bool
    filling: dict[Hashable, list[Storage]] = field(default_factory=dict)
    resting: dict[Storage, Storage] = field(default_factory=dict)
    running: Queue[Whole] = field(default_factory=lambda: Queue(BUCKET_BYTES))

    def add(self, together: Hashable, gradient: Storage, unit: object, rest: Storage | None = None) -> None:
        """One more gradient is there, of the block `unit`; those that go `together` are in one bucket, which begins
        when it is full. `rest`, what the scatter of this one brings, is there from then on."""
        if rest is not None:
            self.resting[gradient] = rest
        members = self.filling.setdefault(together, [])
        members.append(gradient)
        if sum(member.nbytes for member in members) >= BUCKET_BYTES:
            self._begin(self.filling.pop(together), unit)

    def drain(self) -> None:
        """The backward is over: those that are not full begin, and all end."""
        for members in self.filling.values():
            self.book.step("whole gradients scattered")
            self._begin(members, object())
        self.filling = {}
        self.running.drain()

    def _begin(self, members: list[Storage], unit: object) -> None:
        """A bucket is copied and sent; those of earlier blocks are waited for when others have begun behind them."""
        for member in members:
            self.book.use(member)
            if member in self.resting:
                self.resting[member].born = self.book.now
        first, nbytes = members[0], sum(member.nbytes for member in members)
        if self.staged:
            self.book.new("temporaries", first.node, first.where, nbytes)
        self.running.add(Whole(self.book, self.book.new("whole gradients", first.node, first.where, nbytes)), unit)
