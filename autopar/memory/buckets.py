"""Whole gradients while they are scattered to their parameters' layout at rest; those of ZeRO-1 and ZeRO-2 in buckets,
as runtime.gradsync does it. Used by memory.backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.buckets import BUCKET_BYTES, full, travels_alone
from autopar.deferred_waits import Queue
from autopar.layout import in_order
from autopar.memory.storages import Book, Storage
from autopar.problem.pairs import LayoutPair


class Whole:
    """A whole gradient, or a flat copy of a bucket of them, that goes through a chain of collectives: `held` is the
    input of the collective that runs, `coming` its result if others follow, with the bytes of the results of these."""

    def __init__(self, book: Book, held: Storage, halfway: Sequence[float] = ()) -> None:
        self.book = book
        self._runs(held, halfway)

    @property
    def nbytes(self) -> float:
        """Bytes that are there until the collective is done."""
        return self.held.nbytes

    @property
    def more(self) -> bool:
        """Whether a collective has not begun yet."""
        return self.coming is not None

    def go_on(self) -> bool:
        """End the collective that runs; begin the next one if there is one."""
        self.wait()
        if self.coming is None:
            return False
        self._runs(self.coming, self.halfway)
        return True

    def wait(self) -> None:
        """End the collective that runs."""
        self.book.use(self.held)

    def _runs(self, held: Storage, halfway: Sequence[float]) -> None:
        self.held, self.halfway = held, halfway[1:]
        self.coming = self.book.new(held.kind, held.node, held.where, halfway[0]) if halfway else None


def copied(lies: LayoutPair, nbytes: float) -> bool:
    """Whether a gradient of `nbytes` of a parameter that `lies` so is copied before it is summed over ranks: not where
    it travels by itself, and is cut along dim 0 (runtime.coalesced)."""
    cuts = [lies.rest[axis] for axis in lies.gathered]
    return not (travels_alone(nbytes) and cuts and all(map(in_order, cuts)))


@dataclass(eq=False)
class Buckets:
    """The buckets of whole gradients of one backward. What a bucket sends (a flat copy of its small gradients, and its
    large ones as they are) stays until the scatter is waited for, which is when a later block has begun further
    scatters (autopar.deferred_waits).

    staged      gloo, on CPUs: while a scatter runs there is one more copy, in which it sums; scatters run one by one
    filling     layouts of parameters -> the gradients of the bucket that is not full yet
    resting     whole gradient -> the result of its scatter
    running     what is being scattered
    """

    book: Book
    staged: bool
    filling: dict[LayoutPair, list[Storage]] = field(default_factory=dict)
    resting: dict[Storage, Storage] = field(default_factory=dict)
    running: Queue[Whole] = field(default_factory=lambda: Queue(BUCKET_BYTES))

    def add(self, lies: LayoutPair, gradient: Storage, unit: object, rest: Storage | None = None) -> None:
        """Add a gradient of the block `unit`. Those of parameters that lie alike share a bucket, which is sent when
        full. `rest` is the result of this one's scatter, which is there from then on."""
        if rest is not None:
            self.resting[gradient] = rest
        members = self.filling.setdefault(lies, [])
        members.append(gradient)
        if full(sum(member.nbytes for member in members)):
            self._begin(lies, self.filling.pop(lies), unit)

    def drain(self) -> None:
        """The backward has ended: send the buckets that are not full, and wait for all."""
        for lies, members in self.filling.items():
            self.book.step("whole gradients scattered")
            self._begin(lies, members, object())
        self.filling = {}
        self.running.drain()

    def _begin(self, lies: LayoutPair, members: list[Storage], unit: object) -> None:
        """Send a bucket; wait for those of earlier blocks as the queue says."""
        for member in members:
            self.book.use(member)
            if member in self.resting:
                self.resting[member].born = self.book.now
        first, nbytes = members[0], sum(member.nbytes for member in members)
        if self.staged:
            self.book.new("temporaries", first.node, first.where, nbytes)
        copied_bytes = sum(member.nbytes for member in members if copied(lies, member.nbytes))
        if copied_bytes:
            sent = self.book.new("whole gradients", first.node, first.where, copied_bytes)
            self.running.add(Whole(self.book, sent), unit)
        for member in members:
            if not copied(lies, member.nbytes):
                self.running.add(Whole(self.book, member), unit)
