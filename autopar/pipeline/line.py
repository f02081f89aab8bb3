"""What the model itself gathers and sums, in the order in which it runs: what hides under all its operators taken together need not hide where it stands.

    forward    the gather of a weight begins with the gather before it (runtime.ahead), behind blocks with the last of them, or a few before
    backward   the same the other way round; gradients are scattered behind the operators that make them, are at their leaves when enough more is on its way (autopar.late), and
               are summed in buckets from there (runtime.gradsync)

Collectives of one axis run one after the other, in blocks beside what these have in the background themselves.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.late import BUCKETS, Queue
from autopar.layout import BUCKET_BYTES
from autopar.pipeline.lines import Sent, Stop, Stops, Sum
from autopar.pipeline.work import BACKWARD, Pass, shown_s
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


class Line:
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
            summed.of_block.append(Sum(one.key, one.sent.times(each), one.first and one.first.times(each)))
        else:
            self.stops.at(self.program.ops[name], back=True).sums.append(one)

    def more_s(self, scopes: Mapping[str, Sequence[Pass]], shares: Mapping[str, float], way: int, contention: float, *, at_once: bool) -> float:
        """Seconds by which a pass takes longer than that: `scopes` as they are priced, of whose collectives in the background the `shares` show. `at_once`: the first gathers begin
        with the pass, as those of a backward that follows its forward."""
        back, none = way == BACKWARD, _Summed()
        summed = {scope: self._summed[scope] if back else none for scope in scopes}
        runs = {scope: _Ran.of(passes[way], self.program.runs[scope].count, self.gathers_bytes[scope, way], summed[scope], contention) for scope, passes in scopes.items() if scope}
        late_s = self._late_s(runs, contention, back=back, at_once=at_once)
        own_s = scopes[""][way].work_s - summed[""].shown_s - self._opened_s(back=back) if "" in scopes else 0.0
        took_s = own_s + late_s + sum(ran.seconds for ran in runs.values())
        return max(0.0, took_s - sum(passes[way].work_s + shares[scope] * passes[way].background_s for scope, passes in scopes.items()))

    def _opened_s(self, *, back: bool) -> float:
        """Seconds of collectives of weights that are taken when nothing has computed yet."""
        return sum(load.seconds for stop in self.stops.named("", back=back).values() for _, sent in stop.opens for load in sent.way)

    def _late_s(self, runs: Mapping[str, _Ran], contention: float, *, back: bool, at_once: bool) -> float:
        """Seconds in which a pass waits for gathers that have not come and gradients that are on their way, and by which these make what computes beside them longer."""
        begins = {self.program.runs[scope].ports[0]: ran for scope, ran in runs.items()}
        found: dict[str, Stop | _Ran] = {**self.stops.named("", back=back), **begins}
        order = [found[name] for name in sorted(found, key=lambda name: self.program.order[name], reverse=back)]
        clock = _Clock([gather for each in order for gather in _gathers(each)], contention)
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
    clock = _Clock([gather for stop in stops for gather in _gathers(stop)], contention)
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
    """A pass as far as it has come: seconds since its begin, what of them it has waited, and how long each axis was busy with what blocks move."""

    def __init__(self, gathers: Sequence[Gather], contention: float) -> None:
        self._gathers, self._taken, self._contention = gathers, 0, contention
        self._before_bytes = [0.0, *itertools.accumulate(sent.nbytes for sent, _ in gathers)]
        self._ends: list[tuple[int, float]] = []  # of gathers that have begun: the axis of the last collective, and its end
        self._now_s, self._late_s = 0.0, 0.0
        self._blocked_s: defaultdict[int, float] = defaultdict(float)
        self._until_s: dict[int, float] = {}  # by axis, in seconds that are not blocked
        self._late: Queue[_Coming] = Queue(BUCKETS * BUCKET_BYTES)
        self._buckets: defaultdict[object, list[Sent]] = defaultdict(list)
        self._filled: dict[object, tuple[float, float]] = {}  # of a bucket so far: when all of it has come to its leaves, and bytes

    def take(self, count: int, coming_s: float = 0.0) -> None:
        """So many gathers are waited for, but for their last `coming_s`, and those behind each of them begin."""
        for _ in range(count):
            self.begin(self._taken + 1)
            axis, end_s = self._ends[self._taken]
            self._wait(end_s - coming_s - self._of(axis))
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
        come_s = max([self._now_s, *(self._send(sent.way) for sent in stop.sends)])
        for one in stop.sums:
            self._made(one, come_s, id(stop))

    def late_s(self) -> float:
        """What it has waited when all is done."""
        self._late.drain()
        for key in [*self._buckets]:
            self._sum(key)
        self._wait(max((until_s - self._of(axis) for axis, until_s in self._until_s.items()), default=0.0))
        return self._late_s

    def _made(self, one: Sum, come_s: float, unit: Hashable) -> None:
        """An operator or a block, the `unit`, has made a gradient, all of which is scattered at a time."""
        if one.first is None:
            self.summed(one.key, one.sent, come_s)
        else:
            self._late.add(_Coming(self, one, come_s, one.first.nbytes, len(one.first.way)), unit)

    def summed(self, key: object, sent: Sent, come_s: float) -> None:
        """A gradient has come to its leaf; full buckets are summed."""
        bucket = self._buckets[key]
        bucket.append(sent)
        before_s, nbytes = self._filled.get(key, (0.0, 0.0))
        self._filled[key] = max(come_s, before_s, self._now_s), nbytes + sent.nbytes
        if nbytes + sent.nbytes >= BUCKET_BYTES:
            self._sum(key)

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
        """Begin the first `count` gathers, and further ones until enough is on its way behind them."""
        while (begun := len(self._ends)) < len(self._gathers) and (begun < count or self._before_bytes[begun] - self._before_bytes[count] < BUCKET_BYTES):
            self._gather()

    def _gather(self) -> None:
        sent, more = self._gathers[len(self._ends)]
        self._send(sent.way)
        self._ends.append((sent.way[-1].axis, self._until_s[sent.way[-1].axis]))
        self._send(more)

    def _sum(self, key: object) -> None:
        """The collectives of all of a bucket, when all its gradients have come to their leaves."""
        begin_s, _ = self._filled.pop(key)
        for step in zip(*(sent.way for sent in self._buckets.pop(key)), strict=True):
            begin_s = max(self._send([load], begin_s) for load in step)

    def _send(self, way: Sequence[Load], begin_s: float = 0.0) -> float:
        """When collectives have ended that begin now or at `begin_s`, one after the other, as far as is known."""
        end_s = max(begin_s, self._now_s)
        for load in way:
            begun_s = max(end_s - self._blocked_s[load.axis], self._until_s.get(load.axis, 0.0))
            self._until_s[load.axis] = begun_s + load.seconds
            end_s = begun_s + load.seconds + self._blocked_s[load.axis]
        return end_s


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
            self.clock.summed(self.one.key, self.one.sent, self.come_s)
        return self.legs > 0

    def wait(self) -> None:
        """Nothing is dropped."""
