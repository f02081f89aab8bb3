"""A clock that runs through one pass of a rank, operator by operator, and adds up the exposed communication.

The rules by which collectives begin and are waited for are those of the runtime, imported and not repeated here:

    gathers     begin ahead of their use as `autopar.prefetching.timetable` says (runtime.prefetch)
    leaves      are gathered in buckets as `autopar.prefetching.due` says; a block waits for its own before it runs
                (runtime.leaves)
    scatters    of whole gradients to the layout of their leaf are waited for as `autopar.deferred_waits.Queue` says
    sums        of gradients over ranks begin when a bucket is full (autopar.buckets)

Collectives of one stream run one after the other; streams share links and compute units (pipeline.streams).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.buckets import BUCKET_BYTES, gradient_buckets
from autopar.deferred_waits import BUCKETS, Queue
from autopar.layout import legs
from autopar.pipeline.pass_ends import Sent, Stop, Sum, in_one_bucket
from autopar.pipeline.streams import Sending, Streams
from autopar.prefetching import due, timetable
from autopar.problem.hiding import Load, moves

OUTSIDE = None
"""The unit of what belongs to no block."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An operator as a pass comes to it: what it does, and the block that it belongs to (OUTSIDE: none)."""

    stop: Stop
    block: Hashable = OUTSIDE


@dataclass(frozen=True, slots=True)
class LeafBucket:
    """Leaves that are gathered together: the collectives, one after the other with the copies around them, whether they
    begin ahead, and the blocks that wait for them (OUTSIDE: the model itself)."""

    way: Sequence[Load]
    ahead: bool
    blocks: Mapping[Hashable, None]

    @property
    def legs(self) -> int:
        """Collectives that begin ahead."""
        return sum(map(moves, self.way)) if self.ahead else 0


class Clock:
    """One pass over `turns`, up to the present moment. The gathers of `leaves` run during it. Each background
    collective takes the share `contention` of the compute units."""

    def __init__(self, turns: Sequence[Turn], contention: float, leaves: Sequence[LeafBucket] = ()) -> None:
        self.streams = Streams(contention)
        self._turns, self._leaves, self._filled = turns, leaves, 0
        self._fills: dict[int, _Chain] = {}
        self._legs = [bucket.legs for bucket in leaves]
        self._events = [turn.stop.events for turn in turns]
        fetches = [
            _Fetch(sent, turn.block if turn.block is not OUTSIDE else (number, at))
            for number, turn in enumerate(turns)
            for at, sent in enumerate(event for event in self._events[number] if isinstance(event, Sent))
        ]
        self._gathers = [_Chain(self.streams, fetch.sent.way) for fetch in fetches]
        self._due, self._taken = timetable(fetches, BUCKET_BYTES), 0
        self._scatters: Queue[_Scatter] = Queue(BUCKETS * BUCKET_BYTES)
        self._sums: Queue[_BucketSum] = Queue(BUCKET_BYTES)
        self._buckets = _buckets(turns)
        self._begun: list[_BucketSum] = []

    def run(self, *, gathers_first: bool) -> list[float]:
        """Run the pass to its end, when all collectives have ended. Returns the exposed seconds before each turn, and
        as the last entry those of the whole pass. `gathers_first`: the first gathers begin with the pass, as in a
        backward right after its forward."""
        exposed_s = []
        if gathers_first:
            self._begin_gathers()
        self._begin_leaves()
        self._fill(OUTSIDE)
        for number, turn in enumerate(self._turns):
            exposed_s.append(self._exposed_s)
            if turn.block is not OUTSIDE and (not number or self._turns[number - 1].block != turn.block):
                self._fill(turn.block)
            self._run_operator(turn.stop, turn.block, number)
        self._end()
        return [*exposed_s, self._exposed_s]

    @property
    def _exposed_s(self) -> float:
        """Seconds so far in which compute waited for what runs in the background, or was slowed down."""
        return self.streams.now_s - self.streams.work_s

    def _run_operator(self, stop: Stop, block: Hashable, number: int) -> None:
        """Run one operator of `block`, which is turn number `number`: its waits, its compute, its sends."""
        for event in self._events[number]:
            if isinstance(event, Sent):
                self._take_gather()
            else:
                self.streams.run(event)
        self.streams.compute(stop.compute_s)
        for load in stop.behind:
            self.streams.run(load)
        for at, gradient in enumerate(stop.sums):
            if gradient.first is None:
                self.at_leaf(number, at)
        for sent in (sent for sent in stop.sends if sent.way):
            of = next((at for at, gradient in enumerate(stop.sums) if gradient.first is sent), None)
            done = partial(self.at_leaf, number, of) if of is not None else None
            scatter = _Scatter(self.streams, sent.way, sent.held, done)
            scatter.go_on()
            self._scatters.add(scatter, number if block is OUTSIDE else block)
        for load in stop.last:
            self.streams.run(load)

    def _end(self) -> None:
        """Wait for all collectives that have begun."""
        while self._filled < len(self._leaves):
            self._fill_next()
        self._scatters.drain()
        for bucket in dict.fromkeys(self._buckets.values()):
            if bucket.missing:  # gradients whose scatter another operator sends, or none
                self._begin_sum(bucket.members, OUTSIDE)
        self._sums.drain()
        for chain in self._begun:
            chain.finish()

    def _begin_gathers(self) -> None:
        """Before the first gather of a unit: begin the gathers that are due, and the next collectives of those that
        have begun."""
        for number in self._due.pop(self._taken, ()):
            self._gathers[number].next()

    def _take_gather(self) -> None:
        """Wait for the next gather, as its weight is used."""
        self._begin_gathers()
        self._gathers[self._taken].finish()
        self._taken += 1

    def _begin_leaves(self) -> None:
        """Begin the gathers of leaves that are due."""
        if self._filled == len(self._leaves):
            return
        begun = [self._fills[i].begun if i in self._fills else 0 for i in range(len(self._legs))]
        for number in due(self._legs, begun, self._filled):
            self._fills.setdefault(number, _Chain(self.streams, self._leaves[number].way)).next()

    def _fill(self, block: Hashable) -> None:
        """Wait for the leaves of a block, and for all that are gathered before them."""
        last = max(
            (number for number in range(self._filled, len(self._leaves)) if block in self._leaves[number].blocks),
            default=-1,
        )
        while self._filled <= last:
            self._fill_next()

    def _fill_next(self) -> None:
        """Wait for the next bucket of leaves."""
        bucket = self._leaves[self._filled]
        if self._legs[self._filled]:
            self._fills[self._filled].finish()
        else:
            for load in bucket.way:
                self.streams.run(load)
        self._filled += 1
        self._begin_leaves()

    def at_leaf(self, number: int, at: int) -> None:
        """Gradient number `at` of turn `number` has reached its leaf. If it was the last one that its bucket waited
        for, the sum of the bucket begins. The bucket belongs to the block that completes it, whose other sums do not
        wait for it."""
        bucket = self._buckets[number, at]
        bucket.missing -= 1
        if not bucket.missing:
            self._begin_sum(bucket.members, self._turns[number].block)

    def _begin_sum(self, bucket: Sequence[Sum], block: Hashable) -> None:
        """Begin to sum a bucket; its further collectives begin as the queue says."""
        way = in_one_bucket([gradient.sent for gradient in bucket])
        chain = _BucketSum(
            self.streams, way, [sum(held) for held in zip(*(gradient.sent.held for gradient in bucket), strict=True)]
        )
        self._begun.append(chain)
        if way and chain.go_on():
            self._sums.add(chain, chain if block is OUTSIDE else block)


@dataclass(eq=False, slots=True)
class _Bucket:
    """The sums of a bucket, and how many of its gradients have not come to their leaves yet."""

    members: Sequence[Sum]
    missing: int


def _buckets(turns: Sequence[Turn]) -> Mapping[tuple[int, int], _Bucket]:
    """The bucket of each sum, by its turn and its number there. As runtime.gradient_buckets fills them: in the order of
    the backward, whatever the order in which gradients come from their scatters."""
    gradients = [(number, at) for number, turn in enumerate(turns) for at in range(len(turn.stop.sums))]
    found = gradient_buckets(
        gradients,
        alike=lambda one: turns[one[0]].stop.sums[one[1]].key,
        nbytes=lambda one: turns[one[0]].stop.sums[one[1]].sent.nbytes,
    )
    in_bucket = dict[tuple[int, int], _Bucket]()
    for members in found:
        bucket = _Bucket([turns[number].stop.sums[at] for number, at in members], len(members))
        in_bucket.update(dict.fromkeys(members, bucket))
    return {one: in_bucket[one] for one in gradients}


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A gather in the form that `autopar.prefetching` takes."""

    sent: Sent
    unit: Hashable

    @property
    def nbytes(self) -> float:
        return self.sent.nbytes

    @property
    def legs(self) -> int:
        return len(self.sent.way)


class _Chain:
    """Background collectives that run one after the other: the next one begins after the one before has been waited for
    and the copies in front of it are made (layout.legs)."""

    def __init__(self, streams: Streams, way: Sequence[Load]) -> None:
        *self.legs, self._rest = legs(way, moves)
        self.streams, self.begun = streams, 0
        self._running: Sending | None = None

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.begun < len(self.legs)

    def next(self) -> None:
        """Wait for the collective that runs; begin the next one."""
        self.wait()
        *copies, last = self.legs[self.begun]
        self._copy(copies)
        self._running = self.streams.begin(last)
        self.begun += 1

    def wait(self) -> None:
        """Wait for the collective that runs."""
        if self._running is not None:
            self.streams.wait(self._running)
        self._running = None

    def finish(self) -> None:
        """Run and wait for all collectives that are left."""
        while self.more:
            self.next()
        self.wait()
        self._copy(self._rest)

    def _copy(self, copies: Sequence[Load]) -> None:
        for copy in copies:
            self.streams.run(copy)


class _BucketSum(_Chain):
    """The sum of a bucket. `held`: bytes that exist in front of each collective. After a last reduce-scatter it stays
    in the queue until that has been waited for, because the memory of the operand is freed only then
    (runtime.coalesced)."""

    def __init__(self, streams: Streams, way: Sequence[Load], held: Sequence[float]) -> None:
        super().__init__(streams, way)
        self._held = held

    @property
    def nbytes(self) -> float:
        """Bytes that the running collective holds."""
        return self._held[self.begun - 1] if self.begun else 0.0

    def go_on(self) -> bool:
        """Begin the next collective if there is one, or wait for the last. Returns whether to call it again."""
        if not self.more:
            self.wait()
            return False
        self.next()
        return self.more or self.legs[-1][-1].kind == "reduce_scatter"


class _Scatter(_BucketSum):
    """The scatter of a gradient to the layout of its leaf; `then` is called when it is there."""

    def __init__(
        self, streams: Streams, way: Sequence[Load], held: Sequence[float], then: Callable[[], None] | None
    ) -> None:
        super().__init__(streams, way, held)
        self._then = then

    def go_on(self) -> bool:
        """Begin the next collective, or call `then`. Returns whether to call it again."""
        if self.more:
            self.next()
            return True
        self.wait()
        if self._then is not None:
            self._then()
        return False
