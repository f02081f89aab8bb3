"""Collectives of a rank that run in the background one after the other, as the runtime begins them: `runtime.moves.Chain`, `runtime.coalesced.Together`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from autopar.layout import BUCKET_BYTES, legs
from autopar.runtime.leaves import due
from autopar.runtime.prefetch import timetable
from autopar.simulate.pieces import Piece


class Starts(Protocol):
    """A rank."""

    def do(self, pieces: Sequence[Piece], during: str) -> None:
        """Do some pieces in a row; compute waits for collectives."""

    def collective(self, piece: Piece, during: str) -> int:
        """Begin a collective in the background: its task."""

    def wait(self, task: int) -> None:
        """What computes next waits for a task."""


class Chain:
    """Pieces in a row whose collectives run in the background leg by leg (`layout.legs`), in the pass `during` ("": the one that runs)."""

    def __init__(self, rank: Starts, pieces: Sequence[Piece], during: str = "") -> None:
        self.rank, self.during = rank, during
        *self._legs, self._rest = legs(pieces, _moves)
        self.begun = 0
        self._running: int | None = None

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.begun < len(self._legs)

    @property
    def scatters(self) -> bool:
        """Whether the collective that has begun last takes more than it brings."""
        return self._legs[self.begun - 1][-1].kind == "reduce_scatter"

    def go_on(self) -> None:
        """Wait for the collective that runs; begin the next one."""
        self.wait()
        *local, last = self._legs[self.begun]
        self.rank.do(local, self.during)
        self._running = self.rank.collective(last, self.during)
        self.begun += 1

    def wait(self) -> None:
        """Wait for the collective that runs."""
        if self._running is not None:
            self.rank.wait(self._running)
        self._running = None

    def finish(self) -> None:
        """All that is left."""
        while self.more:
            self.go_on()
        self.wait()
        self.rank.do(self._rest, self.during)


@dataclass(eq=False)
class Sums:
    """A bucket that has begun; `held` are the bytes on the rank in front of each collective. What a last scatter took is let go when it has been waited for
    (runtime.coalesced)."""

    chain: Chain
    held: Sequence[float]

    @property
    def nbytes(self) -> float:
        """Bytes of what is on its way."""
        return self.held[self.chain.begun - 1] if self.chain.begun else 0.0

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.chain.more

    def go_on(self) -> bool:
        """Begin the next collective if there is one, or wait for the last; whether to go on later."""
        if not self.chain.more:
            self.chain.wait()
            return False
        self.chain.go_on()
        return self.chain.more or self.chain.scatters

    def wait(self) -> None:
        """Wait for what runs."""
        self.chain.wait()


@dataclass(eq=False)
class Scatter(Sums):
    """A gradient on its way to where `then` takes it."""

    then: Callable[[], None]

    def go_on(self) -> bool:
        """Begin the next collective, or hand over what has come."""
        if self.chain.more:
            self.chain.go_on()
            return True
        self.chain.finish()
        self.then()
        return False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together: (parameter, instance) of each, the sums in a row with copies around them, the bytes on the rank in front of each collective; `each`
    says that they run after every microbatch; `block`: whose backward fills it, None outside of blocks."""

    members: tuple[tuple[str, int], ...]
    sums: tuple[Piece, ...]
    held: tuple[float, ...]
    each: bool = False
    block: Hashable = None


@dataclass(frozen=True, slots=True)
class Filling:
    """Leaves that are gathered together: the collectives in a row with copies around them, which run in the background where they are `behind`, and the blocks
    that wait for them (None: the model itself)."""

    pieces: tuple[Piece, ...]
    behind: bool
    readers: tuple[Hashable, ...]


@dataclass(frozen=True)
class Fetch:
    """A gather that may begin ahead: its pieces, the bytes of its result, and what it belongs to (runtime.prefetch)."""

    pieces: tuple[Piece, ...]
    nbytes: float
    unit: Hashable

    @cached_property
    def legs(self) -> int:
        """Collectives, one after the other."""
        return sum(map(_moves, self.pieces))


@dataclass(eq=False)
class Ahead:
    """The gathers of one direction in their order: which have begun, and how far the rank has come."""

    rank: Starts
    plan: Sequence[Fetch]
    at: int = 0

    def __post_init__(self) -> None:
        self._due = timetable(self.plan, BUCKET_BYTES)
        self._begun: dict[int, Chain] = {}

    def go_on(self) -> None:
        """Where the next one begins its unit, gathers begin and go on."""
        for number in self._due.pop(self.at, ()):
            if number not in self._begun:
                self._begun[number] = Chain(self.rank, self.plan[number].pieces)
            self._begun[number].go_on()

    def take(self) -> None:
        """Wait for the next one."""
        self.go_on()
        chain = self._begun.pop(self.at, None)
        (chain or Chain(self.rank, self.plan[self.at].pieces)).finish()
        self.at += 1


@dataclass(eq=False)
class Leaves:
    """The gathers of leaves of one step: what has begun, and how many are there."""

    rank: Starts
    fillings: Sequence[Filling]
    done: int = 0
    begun: dict[int, Chain] = field(default_factory=dict)

    def go_on(self) -> None:
        """Begin those that are due."""
        takes = [sum(map(_moves, filling.pieces)) if filling.behind else 0 for filling in self.fillings]
        for number in due(takes, [self.begun[i].begun if i in self.begun else 0 for i in range(len(takes))], self.done):
            if number not in self.begun:
                self.begun[number] = Chain(self.rank, self.fillings[number].pieces, "sync")
            self.begun[number].go_on()

    def filled(self, upto: int) -> None:
        """Wait for the gathers up to a number."""
        while self.done <= upto:
            if self.done in self.begun:
                self.begun[self.done].finish()
            else:
                self.rank.do(self.fillings[self.done].pieces, "sync")
            self.done += 1
            self.go_on()

    def last(self, reader: Hashable) -> int:
        """The last one that a reader waits for, -1 for none."""
        return max((i for i, filling in enumerate(self.fillings) if reader in filling.readers), default=-1)


def _moves(piece: Piece) -> bool:
    return piece.axis >= 0
