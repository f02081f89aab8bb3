"""The collectives of each operator in program order (`Stop`), and what a pipeline stage waits for at the two ends of a
pass (`ends_s`).

When a pass over a stage begins nothing is prefetched yet, so that the gathers of its first block are exposed. When it
ends, all gradients must have been scattered, so that the scatters of its last block are exposed. Both happen once per
pass, however many blocks the stage has.

The gathers of the next block begin when a block waits for its first weight (runtime.prefetch). Collectives of one mesh
axis run in the order in which they begin; those in the background have a process group of their own beside those that
compute waits for (runtime.mesh). In a backward the operators are in reverse order, behind those of the forward if the
block runs again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.buckets import BUCKET_BYTES, SOON, travels_alone
from autopar.cluster import MeshAxis
from autopar.cost.comm import collective_s, link_shares
from autopar.deferred_waits import BUCKETS
from autopar.layout import legs
from autopar.prefetching import ends
from autopar.problem.graph import Op, Program
from autopar.problem.hiding import LOCAL_AXIS, Load, Loads, moves

LAST = 1_000
"""A number above those of all operands: events with it come after them."""
BLOCKS = 3
"""The ends of a pass are priced for stages of 1, 2, ... BLOCKS blocks; a longer stage is priced like one of BLOCKS."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A gather of a weight, or a scatter or sum of a gradient.

    `way`: its collectives, one after the other. `nbytes`: of the tensor as it is used on a rank (not sharded).
    `held`: of a gradient, the bytes that each of the collectives reads, which exist until it has ended.
    `axes`: of what goes in buckets, whose `way` has the local copies around collectives too, the mesh axis of each
    collective. `operand`: of a gradient, the number of its operand; autograd comes to the last one first. `key`:
    operators of a stage with the same key share it, as they read the same weight; None: nobody else has it.
    """

    way: Sequence[Load]
    nbytes: float
    held: Sequence[float] = ()
    axes: Sequence[MeshAxis] = ()
    operand: int = 0
    key: Hashable = None

    def times(self, factor: float) -> Sent:
        """`factor` of them as one."""
        return Sent(
            [load.times(factor) for load in self.way],
            factor * self.nbytes,
            [factor * nbytes for nbytes in self.held],
            self.axes,
            self.operand,
            self.key,
        )


def in_one_bucket(sent: Sequence[Sent]) -> list[Load]:
    """The collectives of a bucket, with the copies around them: each runs once over the bytes of all that is packed,
    and once for each large tensor (runtime.coalesced), one right after the other."""
    found = list[Load]()
    for number, parts in enumerate(zip(*(legs(one.way, moves) for one in sent), strict=True)):
        copies_s = sum(load.seconds for part in parts for load in part if not moves(load))
        found += [Load(LOCAL_AXIS, copies_s, {}, "copy")] if copies_s > 0.0 else []
        moved = [
            (load, travels_alone(one.nbytes))
            for one, part in zip(sent, parts, strict=True)
            for load in part
            if moves(load)
        ]
        if moved:
            (first, _), axis = moved[0], sent[0].axes[number]
            packed_bytes = sum(load.nbytes for load, alone in moved if not alone)
            each = [*([packed_bytes] if packed_bytes else []), *(load.nbytes for load, alone in moved if alone)]
            loads = Loads(
                Load(first.axis, collective_s(first.kind, nbytes, axis), link_shares(first.kind, nbytes, axis))
                for nbytes in each
            )
            found += [replace(load, kind=first.kind, nbytes=sum(each)) for load in loads.moving()]
    return found


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of a weight's gradient over ranks, `sent` in buckets with all others of the same `key`.

    `first`: the scatter that brings the gradient to the layout of its leaf before that; when it is waited for is said
    by autopar.deferred_waits. None where the backward makes the gradient in that layout.
    """

    key: Hashable
    sent: Sent
    first: Sent | None = None

    def times(self, factor: float) -> Sum:
        """`factor` of them as one, behind the same scatter."""
        return Sum(self.key, self.sent.times(factor), self.first)


@dataclass(eq=False, slots=True)
class Stop:
    """What one operator does in a pass, in this order. Seconds are those of one instance (of one block).

    opens        gathers of weights before anything has computed, with the number of the operand; nothing can
                 overlap them, so that the price of the operator has them as work
    takes        gathers of weights that it waits for, with the number of the operand; they are prefetched
    waits        other collectives that it waits for before it computes, with the number of the operand
    compute_s    seconds of compute
    behind       collectives that are waited for right after its compute
    sends        scatters of gradients that begin after it, in the background
    sums         sums over ranks that its gradients join
    last         changes of layout of the gradients of its activations, which are waited for behind all that
    """

    compute_s: float = 0.0
    opens: list[tuple[int, Sent]] = field(default_factory=list)
    takes: list[tuple[int, Sent]] = field(default_factory=list)
    waits: list[tuple[int, Load]] = field(default_factory=list)
    behind: list[Load] = field(default_factory=list)
    sends: list[Sent] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    last: list[Load] = field(default_factory=list)

    @property
    def begins(self) -> bool:
        """Whether it waits for anything before it computes."""
        return bool(self.opens or self.takes or self.waits)

    @property
    def goes_on(self) -> bool:
        """Whether any collective comes behind its compute."""
        return bool(self.behind or self.sends or self.sums or self.last)

    @property
    def work_s(self) -> float:
        """Seconds of compute and of the collectives that it waits for (`waits`, `behind`, `last`)."""
        return self.compute_s + sum(
            load.seconds for load in (*(load for _, load in self.waits), *self.behind, *self.last)
        )

    @property
    def events(self) -> list[Load | Sent]:
        """What it waits for before it computes, in the order of operands: gathers of weights, and other collectives."""
        before: list[tuple[int, Load | Sent]] = [*self.opens, *self.takes, *self.waits]
        return [event for _, event in sorted(before, key=lambda event: event[0])]


AHEAD, BACK, AGAIN = WAYS = range(3)
"""Of Stops: the forward, the backward, and what of the forward runs again in front of a block's backward."""


class Stops:
    """The Stop of each operator of `program` that one was asked for, by scope of blocks ("" for operators outside of
    blocks) and one of WAYS."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._found: dict[tuple[str, int], dict[str, Stop]] = {}

    def at(self, op: Op, way: int) -> Stop:
        """The Stop of one operator, or of a block's input; made if there is none."""
        return self._found.setdefault((op.scope, way), {}).setdefault(op.name, Stop())

    def named(self, scope: str, way: int) -> Mapping[str, Stop]:
        """The Stops of a scope by the names of operators, in no fixed order."""
        return self._found.get((scope, way), {})

    def of(self, scope: str, way: int) -> list[Stop]:
        """The Stops of a scope, in the order in which they run (`in_few`)."""
        found = self.named(scope, way)
        order = sorted(found, key=self.program.order.__getitem__, reverse=way == BACK)
        return in_few([found[name] for name in order])


def in_few(stops: Sequence[Stop]) -> list[Stop]:
    """The same Stops, with consecutive ones in one where no collective comes between their compute: fewer to walk
    through."""
    found = list[Stop]()
    for stop in stops:
        last = found[-1] if found else None
        if last is None or stop.begins or last.goes_on:
            found.append(stop)
        else:
            found[-1] = replace(
                stop,
                compute_s=last.compute_s + stop.compute_s,
                opens=last.opens,
                takes=last.takes,
                waits=last.waits,
            )
    return found


def ends_s(stops: Sequence[Stop], blocks: int, contention: float) -> tuple[float, float]:
    """The exposed seconds at the begin and at the end of a pass over a stage of `blocks` blocks, beyond those of blocks
    in the middle of others.

    One block, with operators `stops` in order, runs on an empty machine: from its first wait for a gather (begin) until
    the scatters of the last blocks have ended (end). In the steady state a block takes the longest of its work and of
    the collectives of any axis; what the run takes beyond that is exposed. While collectives are exposed nothing
    computes, so that the share `contention` of the compute units that each of them takes in the price of the block is
    given back.
    """
    now_s, axes, gathers = 0.0, _Axes(), 0
    arrival_s: list[float] = []
    later_legs: list[Sequence[Load]] = []
    for stop in stops:
        for event in stop.events:
            if isinstance(event, Load):
                now_s = axes.run([event], now_s, background=False)
                continue
            if not arrival_s:
                arrival_s, now_s = _prefetched(stops, blocks, axes, now_s)
            now_s, gathers = max(now_s, arrival_s[gathers]), gathers + 1
        now_s += stop.compute_s
        for load in stop.behind:
            now_s = axes.run([load], now_s, background=False)
        for sent in stop.sends:
            axes.run(sent.way[:1], now_s)
            later_legs.append(sent.way[1:])
        for load in stop.last:
            now_s = axes.run([load], now_s, background=False)
    end_s = max([now_s, *axes.free_s.values()])
    for _ in range(min(_blocks_that_scatter(stops), blocks)):
        end_s = max([end_s, *(axes.run(way, now_s) for way in later_legs)])
    steady_s = max([sum(stop.work_s for stop in stops), *_busy_s(stops).values()])
    exposed_s = max(0.0, end_s - steady_s)
    last_s = min(exposed_s, end_s - now_s)
    gather_axes = {load.axis for stop in stops for _, sent in stop.takes for load in sent.way}
    scatter_axes = {load.axis for stop in stops for sent in stop.sends for load in sent.way}
    return (exposed_s - last_s) * max(0.0, 1.0 - contention * len(gather_axes)), last_s * max(
        0.0, 1.0 - contention * len(scatter_axes)
    )


def _blocks_that_scatter(stops: Sequence[Stop]) -> int:
    """The number of last blocks of which the second and later collectives of the scatters have not begun when the last
    block has computed: one, and as many more as it takes to queue SOON of the bytes that may wait
    (autopar.deferred_waits)."""
    return 1 + int(SOON * BUCKETS * BUCKET_BYTES / max(1.0, sum(sent.nbytes for stop in stops for sent in stop.sends)))


def _prefetched(stops: Sequence[Stop], blocks: int, axes: _Axes, now_s: float) -> tuple[list[float], float]:
    """Begin the gathers of the first block, and those of later blocks that the runtime prefetches at that point
    (autopar.prefetching).

    Returns when each gather of the first block has ended, and when compute goes on. Gathers over several axes have
    several legs, and the next leg begins when the one before it has ended: compute waits for that.
    """
    ways = [sent.way for stop in stops for _, sent in sorted(stop.takes, key=lambda take: take[0])]
    each_bytes = [sum(sent.nbytes for stop in stops for _, sent in stop.takes)] * blocks
    # by number of legs: how many blocks have begun each of them
    begun = {len(way): ends(each_bytes, 0, len(way)) for way in ways}
    go_on_s, end_s = now_s, [[now_s] * len(ways) for _ in range(max(end for each in begun.values() for end in each))]
    gathers = [
        (block > 0, leg, block, number)  # in this order: first those of the first block, each leg before the next
        for block in range(len(end_s))
        for number, way in enumerate(ways)
        for leg in range(len(way))
        if block < begun[len(way)][leg]
    ]
    for _, leg, block, number in sorted(gathers):
        go_on_s = max(go_on_s, end_s[block][number] if leg else now_s)
        end_s[block][number] = axes.run(ways[number][leg : leg + 1], go_on_s)
    return end_s[0], go_on_s


@dataclass(eq=False)
class _Axes:
    """The time at which each mesh axis is free, by (axis, whether in the background): the two have process groups of
    their own."""

    free_s: dict[tuple[int, bool], float] = field(default_factory=dict)

    def run(self, loads: Sequence[Load], now_s: float, *, background: bool = True) -> float:
        """Run collectives one after the other from `now_s` on. Returns when the last one has ended."""
        for load in loads:
            key = load.axis, background
            now_s = self.free_s[key] = max(now_s, self.free_s.get(key, 0.0)) + load.seconds
        return now_s


def _busy_s(stops: Sequence[Stop]) -> dict[tuple[int, bool], float]:
    """Seconds of the collectives of one block, by (axis, whether in the background)."""
    found: dict[tuple[int, bool], float] = {}
    for stop in stops:
        moved = [load for sent in (*(sent for _, sent in stop.takes), *stop.sends) for load in sent.way]
        for background, loads in (
            (True, moved),
            (False, [*(load for _, load in stop.waits), *stop.behind, *stop.last]),
        ):
            for load in loads:
                found[load.axis, background] = found.get((load.axis, background), 0.0) + load.seconds
    return found
