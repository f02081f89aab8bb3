"""What the model itself gathers and sums, in the order in which it runs: what hides under all its operators taken together need not hide where it stands.

    forward    the gather of a weight begins with the gather before it (runtime.prefetch), behind blocks with the last of them, or a few before
    backward   the same the other way round; gradients are scattered behind the operators that make them, are at their leaves when enough more is on its way (autopar.deferred_waits), and
               are summed in buckets from there (runtime.gradsync)

Collectives of one axis run one after the other, in blocks beside what these have in the background themselves.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.deferred_waits import BUCKETS, Queue
from autopar.layout import BUCKET_BYTES
from autopar.pipeline.pass_ends import Sent, Stop, Stops, Sum
from autopar.pipeline.work import BACKWARD, Pass, least_s, shown_s
from autopar.prefetching import ends
from autopar.problem.graph import Program
from autopar.problem.hiding import Load, Loads


@dataclass(eq=False)
class _Summed:
    """Sums of gradients of the model itself, or of the blocks of a scope, as they are priced all together: seconds that do not hide, and those that may, by axis; and what each block
    sums."""

    shown_s: float = 0.0
    behind_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    of_block: list[Sum] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Ran:
    """A run of blocks in one pass: its seconds but for sums of gradients, and those of each axis with its own collectives; what its first block gathers, so many `weights`, and what
    begins with that for the next ones; the share of it in which gathers of what follows begin; how many blocks there are, and what each sums; the share of its seconds in which it
    computes, and others that move take units of it: while it waits itself they take none."""

    seconds: float
    busy_s: Mapping[int, float]
    takes: Sent
    weights: int
    more: Sequence[Load]
    reached: float
    count: int
    sums: Sequence[Sum]
    computing: float

    @classmethod
    def of(cls, made: Pass, count: int, each_bytes: Sequence[float], summed: _Summed, contention: float) -> _Ran:
        """Of a pass over `count` blocks that gather weights of so many bytes each."""
        block_bytes = sum(each_bytes)
        reached = min(1.0, math.ceil(BUCKET_BYTES / max(1.0, block_bytes)) / count)
        left, moving = Pass(), made.ahead.moving()
        left.add(made)
        left.adding_s, left.lag_s = made.adding_s - summed.shown_s, 0.0
        left.ahead = Loads(load.times(1.0 - reached) for load in moving)
        left.behind = Loads(load.times(max(0.0, 1.0 - summed.behind_s[load.axis] / load.seconds)) for load in made.behind.moving())
        busy = {load.axis: load.seconds for loads in (left.ahead, left.behind) for load in loads.moving()}
        seconds, computes_s = left.work_s + shown_s(left, contention), left.compute_s + left.waited.local_s
        return cls(seconds, busy, Sent([load.times(1.0 / count) for load in moving], reached * count * block_bytes), len(each_bytes),
                   [load.times(reached - 1.0 / count) for load in moving], reached, count, summed.of_block, min(1.0, computes_s / (seconds or 1.0)))

    @property
    def coming_s(self) -> float:
        """Seconds in which its first block computes while the rest of its weights comes: it begins with the first of them, and ends behind the last."""
        gathers_s = sum(load.seconds for load in self.takes.way)
        return (1.0 - 1.0 / self.weights) * min(gathers_s, self.seconds / self.count) if self.weights else 0.0


class Timeline:
    """What is noted of a program, and what its passes take longer in this order than priced all together."""

    def __init__(self, program: Program) -> None:
        self.program, self.stops = program, Stops(program)
        self.gathers_bytes: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # of each weight of one block of a scope, by pass
        self._summed: defaultdict[str, _Summed] = defaultdict(_Summed)

    def sums(self, place: tuple[str, str], one: Sum, count: float, hidden: Sequence[float]) -> None:
        """The sum of a gradient of a weight that is read first at `place`, in the blocks of a scope (or none) by an operator: of `count` instances, the shares `hidden` of its
        collectives priced as if they hid."""
        scope, name = place
        summed, each = self._summed[scope], count / (self.program.runs[scope].count if scope else 1)
        for load, share in zip(one.sent.way, hidden, strict=True):
            summed.shown_s += count * (1.0 - share) * load.seconds
            summed.behind_s[load.axis] += count * share * load.seconds
        if scope:
            summed.of_block.append(one.times(each))
        else:
            self.stops.at(self.program.ops[name], back=True).sums.append(one)

    def more_s(self, scopes: Mapping[str, Sequence[Pass]], shares: Mapping[str, float], way: int, contention: float, *, at_once: bool) -> float:
        """Seconds by which a pass takes longer than that: `scopes` as they are priced, of whose collectives in the background the `shares` show. Less than none where no blocks are in it:
        what is known operator by operator is not taken to come evenly. `at_once`: the first gathers begin with the pass, as those of a backward that follows its forward."""
        back, none = way == BACKWARD, _Summed()
        summed = {scope: self._summed[scope] if back else none for scope in scopes}
        runs = {scope: _Ran.of(passes[way], self.program.runs[scope].count, self.gathers_bytes[scope, way], summed[scope], contention) for scope, passes in scopes.items() if scope}
        late_s = self._late_s(runs, contention, back=back, at_once=at_once)
        own_s = scopes[""][way].work_s - summed[""].shown_s - self._opened_s(back=back) if "" in scopes else 0.0
        took_s = own_s + late_s + sum(ran.seconds for ran in runs.values())
        priced_s = sum(passes[way].work_s + shares[scope] * passes[way].background_s for scope, passes in scopes.items())
        return max(took_s, priced_s if runs else sum(least_s(passes[way], contention) for passes in scopes.values())) - priced_s

    def _opened_s(self, *, back: bool) -> float:
        """Seconds of collectives of weights that are taken when nothing has computed yet."""
        return sum(load.seconds for stop in self.stops.named("", back=back).values() for _, sent in stop.opens for load in sent.way)

    def _late_s(self, runs: Mapping[str, _Ran], contention: float, *, back: bool, at_once: bool) -> float:
        """Seconds in which a pass waits for gathers that have not come and gradients that are on their way, and by which these make what computes beside them longer."""
        begins = {self.program.runs[scope].ports[0]: ran for scope, ran in runs.items()}
        found: dict[str, Stop | _Ran] = {**self.stops.named("", back=back), **begins}
        order = [found[name] for name in sorted(found, key=lambda name: self.program.order[name], reverse=back)]
        clock = _Clock([gather for each in order for gather in _gathers(each)], contention, blocks=bool(runs))
        if at_once:
            clock.begin(1)
        for each in order:
            clock.take(len(_gathers(each)), each.coming_s if isinstance(each, _Ran) else 0.0)
            if isinstance(each, _Ran):
                clock.run(each)
            else:
                clock.operator(each)
        return clock.late_s()


def waits_s(stops: Sequence[Stop], contention: float) -> float:
    """Seconds that a stage of operators of the model itself waits in a pass over them, in that order, for what it gathers and sends, and by which that makes longer what computes."""
    clock = _Clock([gather for stop in stops for gather in _gathers(stop)], contention, blocks=False)
    for stop in stops:
        clock.take(len(_gathers(stop)))
        clock.operator(stop)
    return clock.late_s()


Gather = tuple[Sent, Sequence[Load]]  # what is waited for, and what begins behind it


def _gathers(each: _Ran | Stop) -> list[Gather]:
    """What is gathered for it ahead."""
    if isinstance(each, _Ran):
        return [(each.takes, each.more)] if each.takes.way else []
    return [(sent, ()) for _, sent in (*each.opens, *each.takes)]


class _Clock:
    """A pass as far as it has come: seconds since its begin, what of them it has waited, and how long each axis was busy with what blocks move.

    Collectives of one gather, scatter or sum follow each other as autopar.prefetching and autopar.deferred_waits let them go on. Where `blocks` are in the pass they follow at once, and nothing waits for
    a scatter before the end: what blocks gather and scatter lets others go on too, and is known as a whole alone.
    """

    def __init__(self, gathers: Sequence[Gather], contention: float, *, blocks: bool) -> None:
        self._taken, self._contention, self._blocks = 0, contention, blocks
        self._gathers = [_Gathering(self, [sent.way] if blocks else [[load] for load in sent.way], behind=more) for sent, more in gathers]
        self._each_bytes = [sent.nbytes for sent, _ in gathers]
        self._now_s, self._late_s = 0.0, 0.0
        self._blocked_s: defaultdict[int, float] = defaultdict(float)
        self._until_s: dict[int, float] = {}  # by axis, in seconds that are not blocked
        self._late: Queue[_Coming | _Scatter] = Queue(BUCKETS * BUCKET_BYTES)
        self._sums: Queue[_Summing] = Queue(BUCKET_BYTES)
        self._buckets: defaultdict[object, list[Sum]] = defaultdict(list)
        self._filled: dict[object, tuple[float, float]] = {}  # of a bucket so far: when all of it has come to its leaves, and bytes

    def take(self, count: int, coming_s: float = 0.0) -> None:
        """So many gathers are waited for, but for their last `coming_s`, and those behind each of them begin."""
        for _ in range(count):
            self.begin(self._taken + 1)
            self._gathers[self._taken].wait(coming_s)
            self._taken += 1

    def run(self, ran: _Ran) -> None:
        """_Ran; what follows them begins where they are reached from there."""
        for number in range(ran.count):
            if number == round((1.0 - ran.reached) * ran.count):
                self.begin(self._taken)
            for done in (ran.sums or (None,))[::-1]:  # spread evenly
                part = ran.count * max(1, len(ran.sums))
                self._works(ran.seconds / part, {axis: min(busy_s, ran.seconds) / part for axis, busy_s in ran.busy_s.items()}, ran.computing)
                if done is not None:
                    self._made(done, self._now_s, (id(ran), number))

    def operator(self, stop: Stop) -> None:
        """One operator of the model itself."""
        self._works(stop.compute_s)
        self._now_s += stop.work_s - stop.compute_s
        if self._blocks:
            come_s = max([self._now_s, *(self._send(sent.way) for sent in stop.sends)])
            for one in stop.sums:
                self._made(one, come_s, id(stop))
            return
        for sent in stop.sends:
            scatter = _Scatter(self, [[load] for load in sent.way], held=sent.held, one=next((one for one in stop.sums if one.first is sent), None))
            scatter.go_on()
            self._late.add(scatter, scatter)
        for one in stop.sums:
            if not any(one.first is sent for sent in stop.sends):
                self._made(one, self._now_s, id(stop))

    def late_s(self) -> float:
        """What it has waited when all is done."""
        self._late.drain()
        for key in [*self._buckets]:
            self._sum(key)
        self._sums.drain()
        self._wait(max((until_s - self._of(axis) for axis, until_s in self._until_s.items()), default=0.0))
        return self._late_s

    def _made(self, one: Sum, come_s: float, unit: Hashable) -> None:
        """An operator or a block, the `unit`, has made a gradient, all of which is scattered at a time."""
        if one.first is None:
            self.summed(one, come_s)
        else:
            self._late.add(_Coming(self, one, come_s, one.first.nbytes, len(one.first.way)), unit)

    def summed(self, one: Sum, come_s: float) -> None:
        """A gradient has come to its leaf; full buckets are summed."""
        self._buckets[one.key].append(one)
        before_s, nbytes = self._filled.get(one.key, (0.0, 0.0))
        self._filled[one.key] = max(come_s, before_s, self._now_s), nbytes + one.sent.nbytes
        if nbytes + one.sent.nbytes >= BUCKET_BYTES:
            self._sum(one.key)

    def _of(self, axis: int) -> float:
        """Seconds that an axis has had."""
        return self._now_s - self._blocked_s[axis]

    def _works(self, seconds: float, busy_s: Mapping[int, float] | None = None, computing: float = 1.0) -> None:
        """Work, of which the share `computing` is slower while anything moves beside it but what it brings itself, with which an axis is busy so long."""
        busy_s, pace = busy_s or {}, 1.0 - computing + computing / (1.0 - self._contention)  # pace: seconds beside others of one alone
        beside_s = [min(until_s - self._of(axis), (seconds - busy_s.get(axis, 0.0)) * pace) for axis, until_s in self._until_s.items()]
        more_s = (1.0 - 1.0 / pace) * max([0.0, *beside_s])
        self._now_s += seconds + more_s
        self._late_s += more_s
        for axis, own_s in busy_s.items():
            self._blocked_s[axis] += own_s

    def _wait(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)
        self._late_s += max(0.0, seconds)

    def begin(self, count: int) -> None:
        """Begin the first `count` gathers, and go on with further ones as far ahead as the runtime does (autopar.prefetching)."""
        at = count - 1
        until = {legs: ends(self._each_bytes, at, legs) for legs in {len(gather.legs) for gather in self._gathers}}
        wanted = {number: sum(number < end for end in until[len(self._gathers[number].legs)]) for number in range(max(0, at), max([at, *(end for each in until.values() for end in each)]))}
        for own, leg in itertools.product((True, False), range(max(until, default=0))):
            for number, legs in wanted.items():
                if (number == at) == own and self._gathers[number].begun <= leg < legs:
                    self._gathers[number].go_on()

    def _sum(self, key: object) -> None:
        """The first collective of all of a bucket, when all its gradients have come to their leaves. The next one, or what waits for a scatter, comes when enough of later
        buckets is behind it."""
        begin_s, _ = self._filled.pop(key)
        bucket = self._buckets.pop(key)
        if self._blocks:
            for step in zip(*(one.sent.way for one in bucket), strict=True):
                begin_s = max(self._send([load], begin_s) for load in step)
            return
        legs = [[Load(step[0].axis, sum(load.seconds for load in step), {}, step[0].kind)] for step in zip(*(one.sent.way for one in bucket), strict=True)]
        summing = _Summing(self, legs, begin_s, held=[sum(held) for held in zip(*(one.sent.held for one in bucket), strict=True)])
        if legs and summing.go_on():
            self._sums.add(summing, summing)

    def start(self, way: Sequence[Load], begin_s: float = 0.0) -> float:
        """Begin collectives, one after the other, now or at `begin_s`: until when the axis of the last is busy, in seconds that are not blocked."""
        self._send(way, begin_s)
        return self._until_s[way[-1].axis]

    def wait_for(self, axis: int, until_s: float) -> None:
        """What computes waits for what has begun (`start`)."""
        self._wait(until_s - self._of(axis))

    def _send(self, way: Sequence[Load], begin_s: float = 0.0) -> float:
        """When collectives have ended that begin now or at `begin_s`, one after the other, as far as is known."""
        end_s = max(begin_s, self._now_s)
        for load in way:
            begun_s = max(end_s - self._blocked_s[load.axis], self._until_s.get(load.axis, 0.0))
            self._until_s[load.axis] = begun_s + load.seconds
            end_s = begun_s + load.seconds + self._blocked_s[load.axis]
        return end_s


@dataclass(eq=False)
class _Chain:
    """Collectives in `legs`, each of one or more in a row: a leg begins, from `begin_s` on, when the one before it has been waited for."""

    clock: _Clock
    legs: Sequence[Sequence[Load]]
    begin_s: float = 0.0
    begun: int = 0
    until_s: float = 0.0

    @property
    def more(self) -> bool:
        """Whether a leg is yet to begin."""
        return self.begun < len(self.legs)

    def next(self) -> bool:
        """Wait for the leg that runs; begin the next one, if there is one."""
        self.wait()
        if not self.more:
            return False
        self.until_s = self.clock.start(self.legs[self.begun], self.begin_s)
        self.begun += 1
        return True

    def wait(self, coming_s: float = 0.0) -> None:
        """Wait for the leg that runs, but for its last `coming_s`."""
        if self.begun:
            self.clock.wait_for(self.legs[self.begun - 1][-1].axis, self.until_s - coming_s)


@dataclass(eq=False)
class _Gathering(_Chain):
    """A gather; with those of a first block, `behind` for the next ones."""

    behind: Sequence[Load] = ()

    def go_on(self) -> None:
        """Begin the next leg."""
        self.next()
        if self.behind:
            self.clock.start(self.behind)


@dataclass(eq=False)
class _Coming:
    """A gradient of so many bytes on its way to its leaf, where it is at a time at the earliest; `legs`: collectives that have not been waited for."""

    clock: _Clock
    one: Sum
    come_s: float
    nbytes: float
    legs: int

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.legs > 1

    def go_on(self) -> bool:
        """Wait for a collective; whether another one begins."""
        self.legs -= 1
        if self.legs <= 0:
            self.clock.summed(self.one, self.come_s)
        return self.legs > 0

    def wait(self) -> None:
        """Nothing is dropped."""


@dataclass(eq=False)
class _Summing(_Chain):
    """A bucket on its way: `held` are the bytes in front of each collective. What it has scattered last is waited for when enough is behind it, whose memory goes
    then (runtime.coalesced)."""

    held: Sequence[float] = ()

    @property
    def nbytes(self) -> float:
        """Bytes of what is on its way."""
        return self.held[self.begun - 1] if self.begun else 0.0

    def go_on(self) -> bool:
        """Wait for the collective that runs, begin the next one if there is one; whether to go on later."""
        return self.next() and (self.more or self.legs[-1][-1].kind == "reduce_scatter")


@dataclass(eq=False)
class _Scatter(_Summing):
    """A gradient on its way to its leaf, where the sum `one` is of it."""

    one: Sum | None = None

    def go_on(self) -> bool:
        """Wait for the collective that runs, begin the next one or sum what has come; whether to go on later."""
        if self.next():
            return True
        if self.one is not None:
            self.clock.summed(self.one, 0.0)
        return False
