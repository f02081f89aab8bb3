"""Gathers that begin before their use (runtime.ahead): what of the blocks to come is there beside what a block gathers itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.layout import BUCKET_BYTES
from autopar.memory.book import Book, Storage


@dataclass(eq=False, slots=True)
class Unit:
    """What one block gathers, or the model itself for one operator, of `nbytes` in all. Blocks that are not walked have no storages; `time`
    is when the first of the storages was made."""

    nbytes: float = 0.0
    storages: list[Storage] = field(default_factory=list)
    time: int = 0

    def add(self, storage: Storage) -> None:
        """One more weight, made when its storage was."""
        self.time = self.time if self.storages else storage.born
        self.storages.append(storage)
        self.nbytes += storage.nbytes


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
        unseen = sum(other.nbytes for other in coming if not other.storages)
        for storage in (storage for other in coming for storage in other.storages):
            storage.born = min(storage.born, unit.time)
        if at and not units[at - 1].storages:
            unseen += max(0.0, sum(u.nbytes for u in _coming(units, at - 1)) - sum(u.nbytes for u in coming))
        if unseen:
            made = book.new("gathered weights", "weights of the blocks to come", "", unseen)
            following = [later.time for later in units[at + 1:] if later.storages]
            made.born, made.last = unit.time, following[0] if following else max(storage.last for storage in unit.storages)


def _coming(units: Sequence[Unit], at: int) -> Sequence[Unit]:
    """The units behind number `at` that have begun with it."""
    stop, nbytes = at + 1, 0.0
    while stop < len(units) and nbytes < BUCKET_BYTES:
        nbytes += units[stop].nbytes
        stop += 1
    return units[at + 1:stop]
