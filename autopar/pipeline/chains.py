"""Collectives in the background of a rank, one after the other: the counterparts of `runtime.moves.Chain`,
`runtime.coalesced.Together`, `runtime.prefetch` and `runtime.leaves`. Used for prices (pipeline.pass_clock) and by the
simulator (simulate.rank)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from autopar.buckets import BUCKET_BYTES
from autopar.layout import legs
from autopar.prefetching import due, timetable


class Part(Protocol):
    """A collective on a mesh `axis`, or local work where that is negative."""

    @property
    def axis(self) -> int:
        """The number of the mesh axis."""

    @property
    def kind(self) -> str:
        """The kind of the collective."""


class Starts(Protocol):
    """The rank that a chain runs on: a simulated one (simulate.rank), or the streams of a pass (pipeline.streams).
    `during` names the pass that the time counts for ("": the running one)."""

    def do(self, parts: Sequence[Any], during: str) -> None:
        """Run parts one after the other; compute waits for collectives."""

    def collective(self, part: Any, during: str) -> Any:
        """Start a collective in the background. Returns what `wait` takes."""

    def wait(self, begun: Any) -> None:
        """Let compute wait for a collective that was started."""


class Chain:
    """Parts whose collectives run in the background: the next one begins after the one before has been waited for and
    the local parts in front of it are done (`layout.legs`). `during` as in Starts."""

    def __init__(self, rank: Starts, parts: Sequence[Part], during: str = "") -> None:
        self.rank, self.during = rank, during
        *self._legs, self._rest = legs(parts, _moves)
        self.begun = 0
        self._running: Any = None

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.begun < len(self._legs)

    def next(self) -> None:
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
        """Run all parts that are left, and wait for the last collective."""
        while self.more:
            self.next()
        self.wait()
        self.rank.do(self._rest, self.during)


class Sums(Chain):
    """The sum of one bucket of gradients. `held[i]`: bytes on the rank before collective i. If the last collective is a
    reduce-scatter, `go_on` is called once more after it, to wait for it and free its input (runtime.coalesced)."""

    def __init__(self, rank: Starts, parts: Sequence[Part], held: Sequence[float], during: str = "") -> None:
        super().__init__(rank, parts, during)
        self._held = held

    @property
    def nbytes(self) -> float:
        """Bytes of the input of the running collective."""
        return self._held[self.begun - 1] if self.begun else 0.0

    def go_on(self) -> bool:
        """Start the next collective, or wait for the last. Returns whether to call `go_on` again."""
        if not self.more:
            self.wait()
            return False
        self.next()
        return self.more or self._legs[-1][-1].kind == "reduce_scatter"


class Scatter(Sums):
    """The scatter of one weight's gradient to the layout of its leaf, after which `then` is called."""

    def __init__(
        self, rank: Starts, parts: Sequence[Part], held: Sequence[float], then: Callable[[], None] | None
    ) -> None:
        super().__init__(rank, parts, held)
        self._then = then

    def go_on(self) -> bool:
        """Start the next collective, or finish and call `then`. Returns whether to call `go_on` again."""
        if self.more:
            self.next()
            return True
        self.finish()
        if self._then is not None:
            self._then()
        return False


@dataclass(frozen=True)
class Fetch:
    """A gather that can be prefetched: its parts, the bytes of its result, and its unit (runtime.prefetch)."""

    parts: Sequence[Part]
    nbytes: float
    unit: Hashable

    @cached_property
    def legs(self) -> int:
        """Collectives, one after the other."""
        return sum(map(_moves, self.parts))


@dataclass(eq=False)
class Ahead:
    """Prefetching in one direction: the gathers in order, and the number `at` of the next one to be used."""

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
                self._begun[number] = Chain(self.rank, self.plan[number].parts)
            self._begun[number].next()

    def take(self) -> None:
        """Use the next gather: wait for its result."""
        self.go_on()
        chain = self._begun.pop(self.at, None)
        (chain or Chain(self.rank, self.plan[self.at].parts)).finish()
        self.at += 1


@dataclass(frozen=True, slots=True)
class LeafBucket:
    """Leaves that are gathered together: the collectives and the copies around them, whether they run in the background
    (`behind`), and the blocks that wait for them (None: the model itself)."""

    parts: Sequence[Part]
    behind: bool
    readers: Collection[Hashable]


@dataclass(eq=False)
class Leaves:
    """The gathers of the leaves of one step: the chains that have started, and the number `done` of buckets that are
    complete."""

    rank: Starts
    buckets: Sequence[LeafBucket]
    done: int = 0
    begun: dict[int, Chain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._legs = [sum(map(_moves, bucket.parts)) if bucket.behind else 0 for bucket in self.buckets]
        self._last = {reader: index for index, bucket in enumerate(self.buckets) for reader in bucket.readers}
        self._until = [self._last[next(iter(bucket.readers))] + 1 for bucket in self.buckets]

    def go_on(self) -> None:
        """Start the collectives that are due (prefetching.due)."""
        begun = [self.begun[i].begun if i in self.begun else 0 for i in range(len(self._legs))]
        for number in due(self._legs, self._until, begun, self.done):
            if number not in self.begun:
                self.begun[number] = Chain(self.rank, self.buckets[number].parts, "sync")
            self.begun[number].next()

    def fill(self, reader: Hashable) -> None:
        """Wait for the leaves of a reader, and for all that are gathered before them."""
        self._fill(self._last.get(reader, -1))

    def fill_all(self) -> None:
        """Wait for all leaves."""
        self._fill(len(self.buckets) - 1)

    def _fill(self, upto: int) -> None:
        """Wait for the buckets up to number `upto`."""
        while self.done <= upto:
            if self.done in self.begun:
                self.begun[self.done].finish()
            else:
                self.rank.do(self.buckets[self.done].parts, "sync")
            self.done += 1
            self.go_on()


def by_first_forward(
    buckets: Sequence[LeafBucket], readers: Collection[Hashable]
) -> tuple[Sequence[LeafBucket], Sequence[LeafBucket]]:
    """The leaves of a stage that does not open the step: those that its first block waits for, and what is outside of
    blocks (`readers`), which come before, and those that are gathered beside its first forward."""
    came = max((number for number, bucket in enumerate(buckets, 1) if {*readers} & {*bucket.readers}), default=0)
    return buckets[:came], buckets[came:]


def travelling(came: Sequence[LeafBucket]) -> list[LeafBucket]:
    """Of leaves that come before a stage runs (`by_first_forward`), the collectives in the background."""
    return [replace(bucket, parts=[*filter(_moves, bucket.parts)]) for bucket in came if bucket.behind]


def at_reading(came: Sequence[LeafBucket]) -> list[Any]:
    """Of these leaves, what is left when the first block of the stage is called: the copies, and collectives that do
    not run in the background."""
    return [part for bucket in came for part in bucket.parts if not (bucket.behind and _moves(part))]


def _moves(part: Part) -> bool:
    """Whether a part is a collective."""
    return part.axis >= 0
