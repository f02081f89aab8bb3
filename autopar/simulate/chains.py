"""Chains of collectives in the background of a simulated rank: the counterparts of `runtime.moves.Chain`,
`runtime.coalesced.Together`, `runtime.prefetch` and `runtime.leaves`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from autopar.buckets import BUCKET_BYTES
from autopar.layout import legs
from autopar.prefetching import due, timetable
from autopar.simulate.pieces import Piece


class Starts(Protocol):
    """The methods of a simulated rank (`simulate.rank.Rank`) that a chain calls."""

    def do(self, pieces: Sequence[Piece], during: str) -> None:
        """Run pieces one after the other; compute waits for collectives."""

    def collective(self, piece: Piece, during: str) -> int:
        """Start a collective in the background. Returns the number of its task."""

    def wait(self, task: int) -> None:
        """Let the next compute wait for a task."""


class Chain:
    """Pieces whose collectives run in the background, one after the other (`layout.legs`). Their time counts for the
    pass `during` ("": the running one)."""

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
        """Whether the last started collective is a reduce-scatter, whose input is larger than its result."""
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
        """Run all pieces that are left, and wait for the last collective."""
        while self.more:
            self.go_on()
        self.wait()
        self.rank.do(self._rest, self.during)


@dataclass(eq=False)
class Sums:
    """The reduction of one bucket that has started. `held[i]`: bytes on the rank before collective i. If the last
    collective is a reduce-scatter, `go_on` is called once more after it, to wait for it and free its input
    (runtime.coalesced)."""

    chain: Chain
    held: Sequence[float]

    @property
    def nbytes(self) -> float:
        """Bytes of the input of the running collective."""
        return self.held[self.chain.begun - 1] if self.chain.begun else 0.0

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.chain.more

    def go_on(self) -> bool:
        """Start the next collective, or wait for the last. Returns whether to call `go_on` again."""
        if not self.chain.more:
            self.chain.wait()
            return False
        self.chain.go_on()
        return self.chain.more or self.chain.scatters

    def wait(self) -> None:
        """Wait for the running collective."""
        self.chain.wait()


@dataclass(eq=False)
class Scatter(Sums):
    """The reduce-scatter of the gradient of one weight, after which `then` is called."""

    then: Callable[[], None]

    def go_on(self) -> bool:
        """Start the next collective, or finish and call `then`. Returns whether to call `go_on` again."""
        if self.chain.more:
            self.chain.go_on()
            return True
        self.chain.finish()
        self.then()
        return False


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together.

    members  (parameter, instance of its block) of each
    sums     the collectives, one after the other, and the copies around them
    held     bytes on the rank before each collective
    each     whether they run after every microbatch
    block    the block whose backward fills the bucket; None outside of blocks
    """

    members: tuple[tuple[str, int], ...]
    sums: tuple[Piece, ...]
    held: tuple[float, ...]
    each: bool = False
    block: Hashable = None


@dataclass(frozen=True, slots=True)
class LeafBucket:
    """A bucket of leaves that are gathered together: the collectives and the copies around them, whether they run in
    the background (`behind`), and the blocks that wait for them (None: the model itself)."""

    pieces: tuple[Piece, ...]
    behind: bool
    readers: tuple[Hashable, ...]


@dataclass(frozen=True)
class Fetch:
    """A gather that can be prefetched: its pieces, the bytes of its result, and its unit (runtime.prefetch)."""

    pieces: tuple[Piece, ...]
    nbytes: float
    unit: Hashable

    @cached_property
    def legs(self) -> int:
        """Collectives, one after the other."""
        return sum(map(_moves, self.pieces))


@dataclass(eq=False)
class Ahead:
    """Prefetching in one direction: the gathers in order, those that have started, and the number `at` of the next one
    to be used."""

    rank: Starts
    plan: Sequence[Fetch]
    at: int = 0

    def __post_init__(self) -> None:
        self._due = timetable(self.plan, BUCKET_BYTES)
        self._begun: dict[int, Chain] = {}

    def go_on(self) -> None:
        """Start the collectives that are due before the next gather is used (prefetching.timetable)."""
        for number in self._due.pop(self.at, ()):
            if number not in self._begun:
                self._begun[number] = Chain(self.rank, self.plan[number].pieces)
            self._begun[number].go_on()

    def take(self) -> None:
        """Use the next gather: wait for its result."""
        self.go_on()
        chain = self._begun.pop(self.at, None)
        (chain or Chain(self.rank, self.plan[self.at].pieces)).finish()
        self.at += 1


@dataclass(eq=False)
class Leaves:
    """The gathers of the leaves of one step: the chains that have started, and the number `done` of buckets that are
    complete."""

    rank: Starts
    buckets: Sequence[LeafBucket]
    done: int = 0
    begun: dict[int, Chain] = field(default_factory=dict)

    def go_on(self) -> None:
        """Start the collectives that are due (prefetching.due)."""
        takes = [sum(map(_moves, bucket.pieces)) if bucket.behind else 0 for bucket in self.buckets]
        for number in due(takes, [self.begun[i].begun if i in self.begun else 0 for i in range(len(takes))], self.done):
            if number not in self.begun:
                self.begun[number] = Chain(self.rank, self.buckets[number].pieces, "sync")
            self.begun[number].go_on()

    def filled(self, upto: int) -> None:
        """Wait for the buckets up to number `upto`."""
        while self.done <= upto:
            if self.done in self.begun:
                self.begun[self.done].finish()
            else:
                self.rank.do(self.buckets[self.done].pieces, "sync")
            self.done += 1
            self.go_on()

    def last(self, reader: Hashable) -> int:
        """The number of the last bucket that a reader waits for; -1 for none."""
        return max((i for i, bucket in enumerate(self.buckets) if reader in bucket.readers), default=-1)


def _moves(piece: Piece) -> bool:
    """Whether a piece is a collective."""
    return piece.axis >= 0
