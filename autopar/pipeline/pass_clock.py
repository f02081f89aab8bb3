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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.buckets import BUCKET_BYTES, gradient_buckets
from autopar.deferred_waits import BUCKETS, Queue
from autopar.pipeline.chains import Ahead, Fetch, LeafBucket, Leaves, Scatter, Sums
from autopar.pipeline.stops import Sent, Stop, Sum, in_one_bucket
from autopar.pipeline.streams import Streams

OUTSIDE = None
"""The unit of what belongs to no block."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An operator as a pass comes to it: what it does, and the block that it belongs to (OUTSIDE: none)."""

    stop: Stop
    block: Hashable = OUTSIDE


class Clock:
    """One pass over `turns`, up to the present moment. The gathers of `leaves` run during it. Each background
    collective takes the share `contention` of the compute units."""

    def __init__(self, turns: Sequence[Turn], contention: float, leaves: Sequence[LeafBucket] = ()) -> None:
        self.streams = Streams(contention)
        self._turns, self._leaves = turns, Leaves(self.streams, leaves)
        self._events = [turn.stop.events for turn in turns]
        fetches = [
            Fetch(sent.way, sent.nbytes, turn.block if turn.block is not OUTSIDE else (number, at))
            for number, turn in enumerate(turns)
            for at, sent in enumerate(event for event in self._events[number] if isinstance(event, Sent))
        ]
        self._ahead = Ahead(self.streams, fetches)
        self._scatters: Queue[Scatter] = Queue(BUCKETS * BUCKET_BYTES)
        self._sums: Queue[Sums] = Queue(BUCKET_BYTES)
        self._buckets = _buckets(turns)
        self._begun: list[Sums] = []

    def run(self, *, gathers_first: bool) -> float:
        """Run the pass to its end, when all collectives have ended. Returns the exposed seconds, in which compute
        waited for what runs in the background, or was slowed down. `gathers_first`: the first gathers begin with the
        pass, as in a backward right after its forward."""
        if gathers_first:
            self._ahead.go_on()
        self._leaves.go_on()
        self._leaves.fill(OUTSIDE)
        for number, turn in enumerate(self._turns):
            if turn.block is not OUTSIDE and (not number or self._turns[number - 1].block != turn.block):
                self._leaves.fill(turn.block)
            self._run_operator(turn.stop, turn.block, number)
        self._end()
        return self.streams.now_s - self.streams.work_s

    def _run_operator(self, stop: Stop, block: Hashable, number: int) -> None:
        """Run one operator of `block`, which is turn number `number`: its waits, its compute, its sends."""
        for event in self._events[number]:
            if isinstance(event, Sent):
                self._ahead.take()
            else:
                self.streams.run(event)
        self.streams.compute(stop.compute_s)
        self.streams.do(stop.behind)
        for at, gradient in enumerate(stop.sums):
            if gradient.first is None:
                self.at_leaf(number, at)
        for sent in (sent for sent in stop.sends if sent.way):
            of = next((at for at, gradient in enumerate(stop.sums) if gradient.first is sent), None)
            done = partial(self.at_leaf, number, of) if of is not None else None
            scatter = Scatter(self.streams, sent.way, sent.held, done)
            scatter.go_on()
            self._scatters.add(scatter, number if block is OUTSIDE else block)
        self.streams.do(stop.last)

    def _end(self) -> None:
        """Wait for all collectives that have begun."""
        self._leaves.fill_all()
        self._scatters.drain()
        for bucket in dict.fromkeys(self._buckets.values()):
            if bucket.missing:  # gradients whose scatter another operator sends, or none
                self._begin_sum(bucket.members, OUTSIDE)
        self._sums.drain()
        for chain in self._begun:
            chain.finish()

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
        held = [sum(each) for each in zip(*(gradient.sent.held for gradient in bucket), strict=True)]
        chain = Sums(self.streams, way, held)
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
