"""Gathers that begin before their use (runtime.ahead): what of the blocks to come is there beside what a block gathers itself.

    the block          all that it gathers, and what brought it: the last but one tensor of each gather over several axes
    those behind it    the same, one block or BUCKET_BYTES of them
    and behind those   for each further collective of a gather, as many more: what has come and what it was made of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.layout import BUCKET_BYTES
from autopar.memory.book import Book, Storage


@dataclass(eq=False, slots=True)
class Unit:
    """What one block gathers, or the model itself for one operator, of `nbytes` in all. Blocks that are not walked have no storages; `time`
    is when the first of the storages was made; `halfway` are the bytes on the way to them, the last collective's input first; `more` are whole gradients on
    their way that were not there yet when the one before it ran; `end` is the time at which a block has gone back, whose weights may be let go before."""

    nbytes: float = 0.0
    storages: list[Storage] = field(default_factory=list)
    time: int = 0
    halfway: list[float] = field(default_factory=list)
    more: float = 0.0
    end: int = 0

    def add(self, storage: Storage) -> None:
        """One more weight, made when its storage was."""
        self.time = self.time if self.storages else storage.born
        self.storages.append(storage)
        self.nbytes += storage.nbytes
        for number, nbytes in enumerate(reversed(storage.halfway)):
            self.halfway[number:] = [self.coming(number) + nbytes, *self.halfway[number + 1:]]

    def coming(self, number: int) -> float:
        """Bytes of the input of the last collective but `number`."""
        return self.halfway[number] if 0 <= number < len(self.halfway) else 0.0

    @property
    def alike(self) -> Unit:
        """That of a block that is not walked."""
        return Unit(self.nbytes, halfway=list(self.halfway))


def begin_ahead(book: Book, units: Sequence[Unit], start: int | None = None) -> None:
    """Let the gathers of one direction, in their order, begin when the runtime begins them, the first ones at time `start` if that is given. A block that is walked has beside it what the
    one before it, which is not walked and almost as full, has."""
    if start is not None and units:
        units[0].time = start
        for storage in units[0].storages:
            storage.born = start
    for at, unit in enumerate(units):
        if not unit.storages:
            continue
        coming = _coming(units, at)
        unseen = sum(other.nbytes for other in coming if not other.storages) + _halfway_bytes(units, at)
        for storage in (storage for other in coming for storage in other.storages):
            storage.born = min(storage.born, unit.time)
        if at and not units[at - 1].storages:
            before = sum(u.nbytes for u in _coming(units, at - 1)) + _halfway_bytes(units, at - 1)
            unseen += max(0.0, before - sum(u.nbytes for u in coming) - _halfway_bytes(units, at) - unit.more)
        if unseen:
            made = book.new("gathered weights", "weights of the blocks to come", "", unseen)
            following = [later.time for later in units[at + 1:] if later.storages]
            last = unit.end or (following[0] - 1 if following else max(storage.last for storage in unit.storages))
            made.born, made.last = unit.time, max(unit.time, last)


def _coming(units: Sequence[Unit], at: int) -> Sequence[Unit]:
    """The units behind number `at` whose last collectives have begun with it."""
    return units[at + 1:_stop(units, at)]


def _stop(units: Sequence[Unit], at: int) -> int:
    stop, nbytes = at + 1, 0.0
    while stop < len(units) and nbytes < BUCKET_BYTES:
        nbytes += units[stop].nbytes
        stop += 1
    return stop


def _halfway_bytes(units: Sequence[Unit], at: int) -> float:
    """What is there on its way while number `at` runs, beside what the last collectives bring (runtime.ahead.timetable)."""
    first = _stop(units, at) if at < len(units) else len(units)
    found, early = sum(unit.coming(0) for unit in units[at:first]), 0
    while first < len(units) and at + early + 1 < len(units) and any(unit.coming(early) for unit in units[first:]):
        stop = _stop(units, at + early + 1)
        found += sum(unit.coming(early) + unit.coming(early + 1) for unit in units[first:stop])
        first, early = stop, early + 1
    return found
