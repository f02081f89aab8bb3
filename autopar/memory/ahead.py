"""Gathers that begin before their use (runtime.prefetch): the bytes of later blocks' weights that are in memory while a
block runs.

    the block          all that it gathers, and the input of the last collective of each gather over several axes
    later blocks       as far as prefetching.ends has begun their gathers: the input of the last collective that has
                       begun, and its result"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.memory.storages import Book, Storage
from autopar.prefetching import ends


@dataclass(eq=False, slots=True)
class Unit:
    """The weights that one block gathers, or one operator outside of blocks.

    storages    of the gathered weights; none for blocks that are not walked because they are like one that is
    time        when the first of the storages was made, in steps of the Book
    ways        number of collectives of a gather -> bytes of the input of each collective, in order, and of the
                result of the last one
    more        bytes of whole gradients, being scattered, that were not there yet when the unit before it ran
    end         when the backward of the block has ended; its weights may have been freed before"""

    storages: list[Storage] = field(default_factory=list)
    time: int = 0
    ways: dict[int, tuple[float, ...]] = field(default_factory=dict)
    more: float = 0.0
    end: int = 0

    @property
    def nbytes(self) -> float:
        """Bytes of all gathered weights."""
        return sum(way[-1] for way in self.ways.values())

    def add(self, storage: Storage) -> None:
        """Add the storage of one more gathered weight."""
        self.time = self.time if self.storages else storage.born
        self.storages.append(storage)
        legs, way = len(storage.takes), (*storage.takes, storage.nbytes)
        self.ways[legs] = tuple([a + b for a, b in zip(self.ways.get(legs, (0.0,) * len(way)), way, strict=True)])

    @property
    def alike(self) -> Unit:
        """The unit of a block that is not walked, because it is like this one."""
        return Unit(ways=self.ways)


def gather_into(units: list[Unit], block: Unit | None, storage: Storage) -> None:
    """Add a weight that an operator gathers to the unit of the `block` that is walked, or to a new unit outside of
    blocks."""
    unit = block if block is not None else Unit()
    if not unit.storages:
        units.append(unit)
    unit.add(storage)


def begin_ahead(book: Book, units: Sequence[Unit], start: int | None = None) -> None:
    """Move the begin of each gather of one direction (forward or backward; `units` in order) to where the runtime
    begins it (autopar.prefetching). The first ones begin at time `start` if that is given.

    A walked block also stands for the like blocks before it that are not walked; if more is gathered ahead during one
    of those, that is counted."""
    if start is not None and units:
        units[0].time = start
        for storage in units[0].storages:
            storage.born = start
    nbytes = [unit.nbytes for unit in units]
    for at, unit in enumerate(units):
        if not unit.storages:
            continue
        coming = _Coming.of(units, nbytes, at)
        for storage in coming.storages:
            storage.born = min(storage.born, unit.time)
        unseen = coming.nbytes - sum(storage.nbytes for storage in coming.storages)
        if at and not units[at - 1].storages:
            unseen += max(0.0, _Coming.of(units, nbytes, at - 1).nbytes - coming.nbytes - unit.more)
        if unseen:
            made = book.new("gathered weights", "weights of the blocks to come", "", unseen)
            following = [later.time for later in units[at + 1 :] if later.storages]
            last = unit.end or (following[0] - 1 if following else max(storage.last for storage in unit.storages))
            made.born, made.last = unit.time, max(unit.time, last)


@dataclass(frozen=True)
class _Coming:
    """The gathers of later units that have begun while a unit runs: `nbytes` of all that they hold, and the `storages`
    of weights whose last collective has begun."""

    nbytes: float
    storages: list[Storage]

    @staticmethod
    def of(units: Sequence[Unit], nbytes: Sequence[float], at: int) -> _Coming:
        """What has begun when unit number `at` begins."""
        found, whole = sum(way[-2] for way in units[at].ways.values()), list[Storage]()
        stops = {legs: ends(nbytes, at, legs) for legs in dict.fromkeys(legs for unit in units for legs in unit.ways)}
        for number in range(at + 1, max((end for each in stops.values() for end in each), default=0)):
            for legs, way in units[number].ways.items():
                begun = sum(number < end for end in stops[legs])
                found += sum(way[begun - 1 : begun + 1]) if begun else 0.0
            whole += [storage for storage in units[number].storages if number < stops[len(storage.takes)][-1]]
        return _Coming(found, whole)
