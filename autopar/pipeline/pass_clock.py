"""A clock that runs through one pass, operator by operator and block by block, and adds up the exposed communication.

The rules by which collectives begin and are waited for are those of the runtime, imported and not repeated here:

    gathers     begin ahead of their use as `autopar.prefetching.ends` says (runtime.prefetch)
    scatters    of whole gradients to the layout of their leaf are waited for as `autopar.deferred_waits.Queue` says
    sums        of gradients over ranks begin when a bucket of BUCKET_BYTES is full (runtime.gradsync)

Collectives of one mesh axis run one after the other; those of different axes run side by side.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.deferred_waits import BUCKETS, Queue
from autopar.layout import BUCKET_BYTES
from autopar.pipeline.pass_ends import Sent, Stop, Sum
from autopar.pipeline.work import Pass, shown_s
from autopar.prefetching import ends
from autopar.problem.hiding import Load, Loads

Prefetched = tuple[Sent, Sequence[Load]]
"""A gather that a unit waits for, and the collectives that begin right after it, for later units."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A run of alike blocks as one item of a pass. The blocks are priced together, so that collectives inside of them are known only as totals.

    `seconds`: the run without sums of gradients, with the part of its own collectives that is exposed.
    `own_s`: seconds by mesh axis in which the run's own background collectives use the axis.
    `first_gather`: what the first block gathers, of `weights` weights; `next_gathers` begin with it, for the next blocks.
    `window`: the share of the run that the prefetch window covers, so that gathers of what follows the run begin so early.
    `sums`: the sums of gradients of one block. `compute_share`: the share of `seconds` that computes. Only that part is
    slowed down by collectives beside it; while the run waits for collectives of its own nothing is slowed.
    """

    seconds: float
    own_s: Mapping[int, float]
    first_gather: Sent
    weights: int
    next_gathers: Sequence[Load]
    window: float
    count: int
    sums: Sequence[Sum]
    compute_share: float

    @classmethod
    def of(cls, total: Pass, count: int, weights_bytes: Sequence[float], sums: Sequence[Sum], exposed_sums_s: float,
           background_sums_s: Mapping[int, float], contention: float) -> BlockRun:
        """The run of `count` blocks whose pass takes `total` in all. Each block gathers weights of `weights_bytes`.

        `total` contains the sums of gradients: `exposed_sums_s` behind all compute, and `background_sums_s` by axis. They
        are taken out here, as the clock runs them one by one.
        """
        block_bytes = sum(weights_bytes)
        window = min(1.0, math.ceil(BUCKET_BYTES / max(1.0, block_bytes)) / count)
        gathers = total.ahead.moving()
        inside = Pass()
        inside.add(total)
        inside.adding_s, inside.lag_s = total.adding_s - exposed_sums_s, 0.0
        inside.ahead = Loads(load.times(1.0 - window) for load in gathers)
        inside.behind = Loads(load.times(max(0.0, 1.0 - background_sums_s.get(load.axis, 0.0) / load.seconds))
                              for load in total.behind.moving())
        own_s = {load.axis: load.seconds for loads in (inside.ahead, inside.behind) for load in loads.moving()}
        seconds, compute_s = inside.work_s + shown_s(inside, contention), inside.compute_s + inside.waited.local_s
        first = Sent([load.times(1.0 / count) for load in gathers], window * count * block_bytes)
        after_first = [load.times(window - 1.0 / count) for load in gathers]
        return cls(seconds, own_s, first, len(weights_bytes), after_first, window, count, sums, min(1.0, compute_s / (seconds or 1.0)))

    @property
    def early_s(self) -> float:
        """Seconds by which the first block begins before its gathers have ended.

        It begins with the first of its weights and needs the last one at its end, so that all but one of them overlap its compute.
        """
        gathers_s = sum(load.seconds for load in self.first_gather.way)
        return (1.0 - 1.0 / self.weights) * min(gathers_s, self.seconds / self.count) if self.weights else 0.0

    @property
    def prefetched(self) -> list[Prefetched]:
        """The gather that the run waits for at its begin, if it gathers anything."""
        return [(self.first_gather, self.next_gathers)] if self.first_gather.way else []


class Clock:
    """One pass as far as it has come.

    `gathers` are all gathers of the pass in the order of use. Without blocks the collectives of one gather, scatter or sum
    follow each other as the runtime lets them. With `blocks` they follow at once, and no scatter is waited for before the
    end of the pass: which collectives of blocks the runtime would let go on in between is not known, only their total.

    Two clocks run: seconds since the begin of the pass, and by axis the seconds without those in which blocks use the axis
    for their own collectives. What is in the background advances by the second one.
    """

    def __init__(self, gathers: Sequence[Prefetched], contention: float, *, blocks: bool) -> None:
        self._contention, self._blocks = contention, blocks
        self._gathers = [_Gather(self, [sent.way] if blocks else [[load] for load in sent.way], following=following)
                         for sent, following in gathers]
        self._gather_bytes = [sent.nbytes for sent, _ in gathers]
        self._awaited = 0  # how many gathers have been waited for
        self._now_s, self._exposed_s = 0.0, 0.0
        self._blocks_s: defaultdict[int, float] = defaultdict(float)  # by axis: seconds used by collectives of blocks
        self._free_s: dict[int, float] = {}  # by axis: when its last collective ends, on the axis's own clock
        self._scatters: Queue[_BlockScatter | _Scatter] = Queue(BUCKETS * BUCKET_BYTES)
        self._sums: Queue[_BucketSum] = Queue(BUCKET_BYTES)
        self._buckets: defaultdict[object, list[Sum]] = defaultdict(list)  # by key: gradients of the bucket that is being filled
        self._filled: dict[object, tuple[float, float]] = {}  # by key: when the last of them was at its leaf, and bytes

    def wait_for_gathers(self, count: int, early_s: float = 0.0) -> None:
        """Wait for the next `count` gathers, up to `early_s` before each ends, and begin the gathers that the runtime prefetches then."""
        for _ in range(count):
            self.begin_gathers(self._awaited + 1)
            self._gathers[self._awaited].wait(early_s)
            self._awaited += 1

    def run_blocks(self, run: BlockRun) -> None:
        """Run all blocks of a run; gathers of what follows begin where the prefetch window of the last blocks reaches it."""
        for number in range(run.count):
            if number == round((1.0 - run.window) * run.count):
                self.begin_gathers(self._awaited)
            parts = run.count * max(1, len(run.sums))
            for gradient in (run.sums or (None,))[::-1]:  # gradients are taken to come evenly spread over the block
                self._work(run.seconds / parts, {axis: min(own_s, run.seconds) / parts for axis, own_s in run.own_s.items()},
                           run.compute_share)
                if gradient is not None:
                    self._block_gradient(gradient, self._now_s, (id(run), number))

    def run_operator(self, stop: Stop) -> None:
        """Run one operator outside of blocks."""
        self._work(stop.compute_s)
        self._now_s += stop.work_s - stop.compute_s
        if self._blocks:
            arrived_s = max([self._now_s, *(self._chain_ends_s(sent.way) for sent in stop.sends)])
            for gradient in stop.sums:
                self._block_gradient(gradient, arrived_s, id(stop))
            return
        for sent in stop.sends:
            of = next((gradient for gradient in stop.sums if gradient.first is sent), None)
            scatter = _Scatter(self, [[load] for load in sent.way], held_bytes=sent.held, gradient=of)
            scatter.go_on()
            self._scatters.add(scatter, scatter)
        for gradient in stop.sums:
            if not any(gradient.first is sent for sent in stop.sends):
                self._block_gradient(gradient, self._now_s, id(stop))

    def exposed_s(self) -> float:
        """End the pass: wait for all that is still on its way. Seconds of the whole pass in which compute waited or was slowed down."""
        self._scatters.drain()
        for key in [*self._buckets]:
            self._begin_sum(key)
        self._sums.drain()
        self._wait(max((free_s - self._axis_now_s(axis) for axis, free_s in self._free_s.items()), default=0.0))
        return self._exposed_s

    def _block_gradient(self, gradient: Sum, arrives_s: float, unit: Hashable) -> None:
        """A `unit` (block or operator) has made a gradient, which is at its leaf at `arrives_s` at the earliest."""
        if gradient.first is None:
            self.at_leaf(gradient, arrives_s)
        else:
            self._scatters.add(_BlockScatter(self, gradient, arrives_s, gradient.first.nbytes, len(gradient.first.way)), unit)

    def at_leaf(self, gradient: Sum, arrived_s: float) -> None:
        """Add a gradient that is at its leaf to its bucket, and begin the bucket's sum if it is full."""
        self._buckets[gradient.key].append(gradient)
        last_s, nbytes = self._filled.get(gradient.key, (0.0, 0.0))
        self._filled[gradient.key] = max(arrived_s, last_s, self._now_s), nbytes + gradient.sent.nbytes
        if nbytes + gradient.sent.nbytes >= BUCKET_BYTES:
            self._begin_sum(gradient.key)

    def begin_gathers(self, count: int) -> None:
        """Begin the first `count` gathers, and the legs of later ones that `autopar.prefetching` has begun by then."""
        at = count - 1
        ends_of = {legs: ends(self._gather_bytes, at, legs) for legs in {len(gather.legs) for gather in self._gathers}}
        last = max([at, *(end for each in ends_of.values() for end in each)])
        legs_of = {number: sum(number < end for end in ends_of[len(self._gathers[number].legs)]) for number in range(max(0, at), last)}
        for current, leg in itertools.product((True, False), range(max(ends_of, default=0))):  # the current gather first
            for number, legs in legs_of.items():
                if (number == at) == current and self._gathers[number].begun <= leg < legs:
                    self._gathers[number].go_on()

    def start(self, way: Sequence[Load], not_before_s: float = 0.0) -> float:
        """Begin collectives one after the other, now or at `not_before_s`. When the last one ends, on its axis's clock."""
        self._chain_ends_s(way, not_before_s)
        return self._free_s[way[-1].axis]

    def wait_for(self, axis: int, until_s: float) -> None:
        """Compute waits until `until_s` on the clock of `axis`."""
        self._wait(until_s - self._axis_now_s(axis))

    def _axis_now_s(self, axis: int) -> float:
        """Seconds so far without those in which blocks used the axis."""
        return self._now_s - self._blocks_s[axis]

    def _work(self, seconds: float, own_s: Mapping[int, float] | None = None, compute_share: float = 1.0) -> None:
        """Work for `seconds`, of which `compute_share` is slowed by collectives beside it. `own_s`: by axis, seconds in which the work uses it itself."""
        own_s = own_s or {}
        slowdown = 1.0 - compute_share + compute_share / (1.0 - self._contention)
        beside_s = [min(free_s - self._axis_now_s(axis), (seconds - own_s.get(axis, 0.0)) * slowdown) for axis, free_s in self._free_s.items()]
        slowed_s = (1.0 - 1.0 / slowdown) * max([0.0, *beside_s])
        self._now_s += seconds + slowed_s
        self._exposed_s += slowed_s
        for axis, used_s in own_s.items():
            self._blocks_s[axis] += used_s

    def _wait(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)
        self._exposed_s += max(0.0, seconds)

    def _begin_sum(self, key: object) -> None:
        """Begin to sum a bucket, when its last gradient is at its leaf. Without blocks further collectives of the sum begin as the queue says."""
        begin_s, _ = self._filled.pop(key)
        bucket = self._buckets.pop(key)
        steps = [*zip(*(gradient.sent.way for gradient in bucket), strict=True)]
        if self._blocks:
            for step in steps:
                begin_s = max(self._chain_ends_s([load], begin_s) for load in step)
            return
        legs = [[Load(step[0].axis, sum(load.seconds for load in step), {}, step[0].kind)] for step in steps]
        held_bytes = [sum(held) for held in zip(*(gradient.sent.held for gradient in bucket), strict=True)]
        chain = _BucketSum(self, legs, begin_s, held_bytes=held_bytes)
        if legs and chain.go_on():
            self._sums.add(chain, chain)

    def _chain_ends_s(self, way: Sequence[Load], not_before_s: float = 0.0) -> float:
        """Begin collectives one after the other, now or at `not_before_s`. Seconds since the begin of the pass at which the last ends,
        if blocks use its axis no more."""
        end_s = max(not_before_s, self._now_s)
        for load in way:
            begin_s = max(end_s - self._blocks_s[load.axis], self._free_s.get(load.axis, 0.0))
            self._free_s[load.axis] = begin_s + load.seconds
            end_s = begin_s + load.seconds + self._blocks_s[load.axis]
        return end_s


@dataclass(eq=False)
class _Chain:
    """Background work in `legs` of one or more collectives. A leg begins when the one before it has been waited for, and not before `not_before_s`."""

    clock: Clock
    legs: Sequence[Sequence[Load]]
    not_before_s: float = 0.0
    begun: int = 0
    ends_s: float = 0.0  # of the leg that runs, on the clock of its last axis

    @property
    def more(self) -> bool:
        """Whether a leg is yet to begin."""
        return self.begun < len(self.legs)

    def next(self) -> bool:
        """Wait for the running leg, and begin the next one. Whether there was one."""
        self.wait()
        if not self.more:
            return False
        self.ends_s = self.clock.start(self.legs[self.begun], self.not_before_s)
        self.begun += 1
        return True

    def wait(self, early_s: float = 0.0) -> None:
        """Wait for the running leg, up to `early_s` before it ends."""
        if self.begun:
            self.clock.wait_for(self.legs[self.begun - 1][-1].axis, self.ends_s - early_s)


@dataclass(eq=False)
class _Gather(_Chain):
    """The gather of a weight, or of a run's first block, after which the gathers `following` begin, for the next blocks."""

    following: Sequence[Load] = ()

    def go_on(self) -> None:
        """Begin the next leg."""
        self.next()
        if self.following:
            self.clock.start(self.following)


@dataclass(eq=False)
class _BlockScatter:
    """The scatter of a block's gradient. Its `legs` collectives are priced with the block; here it only fills the queue with
    `nbytes`, and says when the gradient is at its leaf: after its last leg is due, and not before `arrives_s`."""

    clock: Clock
    gradient: Sum
    arrives_s: float
    nbytes: float
    legs: int

    @property
    def more(self) -> bool:
        """Whether a leg is yet to begin."""
        return self.legs > 1

    def go_on(self) -> bool:
        """End a leg; whether another one begins."""
        self.legs -= 1
        if self.legs <= 0:
            self.clock.at_leaf(self.gradient, self.arrives_s)
        return self.legs > 0

    def wait(self) -> None:
        """For `Queue.drop`, which a clock does not use."""


@dataclass(eq=False)
class _BucketSum(_Chain):
    """The sum of a bucket. `held_bytes`: what exists in front of each collective. A last reduce-scatter stays in the queue
    until it is waited for, because the memory of its operand is freed only then (runtime.coalesced)."""

    held_bytes: Sequence[float] = ()

    @property
    def nbytes(self) -> float:
        """Bytes that the running leg holds."""
        return self.held_bytes[self.begun - 1] if self.begun else 0.0

    def go_on(self) -> bool:
        """Wait for the running leg and begin the next one; whether to stay in the queue."""
        return self.next() and (self.more or self.legs[-1][-1].kind == "reduce_scatter")


@dataclass(eq=False)
class _Scatter(_BucketSum):
    """The scatter of a gradient that an operator outside of blocks made; at its leaf it goes into the bucket of `gradient`, if it is the first of several."""

    gradient: Sum | None = None

    def go_on(self) -> bool:
        """Wait for the running leg and begin the next one, or put the gradient into its bucket; whether to stay in the queue."""
        if self.next():
            return True
        if self.gradient is not None:
            self.clock.at_leaf(self.gradient, 0.0)
        return False
