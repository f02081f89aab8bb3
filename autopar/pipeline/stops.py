"""What each operator of a program does in a pass, in program order (`Stop`): its compute, the collectives that it waits
for, and those that it begins in the background. Made by pipeline.passes, run through by pipeline.pass_clock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autopar.buckets import travels_alone
from autopar.cluster import MeshAxis
from autopar.cost.comm import collective_s, link_shares
from autopar.layout import legs
from autopar.problem.graph import Op, Program
from autopar.problem.hiding import LOCAL_AXIS, Load, Loads, moves

LAST = 1_000
"""A number above those of all operands: events with it come after them."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A gather of a weight, or a scatter or sum of a gradient. Equal to itself only.

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


def in_one_bucket(sent: Sequence[Sent]) -> Sequence[Load]:
    """The collectives of a bucket, with the copies around them: each runs once over the bytes of all that is packed,
    and once for each large tensor (runtime.coalesced), one right after the other."""
    return _in_one_bucket(tuple(sent))


@lru_cache(maxsize=1024)  # buckets of alike blocks have the same members, in all stages that these are in
def _in_one_bucket(sent: tuple[Sent, ...]) -> Sequence[Load]:
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

    takes        gathers of weights that it waits for, with the number of the operand; they are prefetched
    waits        other collectives that it waits for before it computes, with the number of the operand
    compute_s    seconds of compute
    behind       collectives that are waited for right after its compute
    sends        scatters of gradients that begin after it, in the background
    sums         sums over ranks that its gradients join
    last         changes of layout of the gradients of its activations, which are waited for behind all that
    """

    compute_s: float = 0.0
    takes: list[tuple[int, Sent]] = field(default_factory=list)
    waits: list[tuple[int, Load]] = field(default_factory=list)
    behind: list[Load] = field(default_factory=list)
    sends: list[Sent] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    last: list[Load] = field(default_factory=list)

    @property
    def begins(self) -> bool:
        """Whether it waits for anything before it computes."""
        return bool(self.takes or self.waits)

    @property
    def goes_on(self) -> bool:
        """Whether any collective comes behind its compute."""
        return bool(self.behind or self.sends or self.sums or self.last)

    @property
    def events(self) -> list[Load | Sent]:
        """What it waits for before it computes, in the order of operands: gathers of weights, and other collectives."""
        before: list[tuple[int, Load | Sent]] = [*self.takes, *self.waits]
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
                takes=last.takes,
                waits=last.waits,
            )
    return found
