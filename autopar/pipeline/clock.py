"""The collectives of a program in program order: by how much a pass is longer than its aggregate price says.

The aggregate price of a pass (pipeline.passes) overlaps all of its background collectives with all of its compute. In
program order less may overlap: a gather can only run between the gather before it and its use, and the sum of a
gradient only after that gradient.

    forward    a gather begins with the block or the gather before it (runtime.prefetch), as gathers of leaves begin
               with buckets (runtime.leaves)
    backward   the same in reverse order, what runs again of a block first; the scatter of a gradient to the layout of
               its leaf is waited for when enough bytes are queued behind it (autopar.deferred_waits); then the gradient
               is summed over ranks in buckets (runtime.gradsync)

Stages of a pipeline are priced so, each by itself (`waits_s`). Of a long run of blocks few are run through; further
ones take what the last of these added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.buckets import BUCKET_BYTES, leaf_buckets
from autopar.pipeline.chains import LeafBucket, at_reading, by_first_forward
from autopar.pipeline.pass_clock import OUTSIDE, Clock, Turn
from autopar.pipeline.stops import AGAIN, AHEAD, BACK, Sent, Stop, Stops, Sum, in_one_bucket
from autopar.pipeline.work import BACKWARD, FORWARD, Pass, least_s
from autopar.problem.graph import Program

MOST, LAST = 12, 4
"""Blocks of a run that are walked through one by one (of small ones, as many as fill so many buckets); each further one
takes the mean of what the last ones added."""

FIRST = 2
"""Blocks of a run at its begin of which leaves may share a bucket with those of the first one."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf that is gathered once per step, first read by the operator `reader`, at position `at` of the program.
    Leaves with equal `kinds` of collectives share buckets. `ahead`: all its collectives are gathers, so that they begin
    early."""

    sent: Sent
    kinds: Hashable
    reader: str
    at: int
    ahead: bool


_Read = tuple[Leaf, Hashable]


class Timeline:
    """The collectives of a program by operator, and the seconds that program order adds to each pass. `gathers`:
    forwards gather the leaves."""

    def __init__(self, program: Program) -> None:
        self.program, self.stops, self.gathers = program, Stops(program), True
        self._leaves: dict[str, list[Leaf]] = {}

    def blocks(self, scope: str) -> int:
        """How many blocks of `scope` run in a pass; 1 for what is outside of blocks."""
        return self.program.ops[self.program.runs[scope].ports[0]].count if scope else 1

    def add_sum(self, reader: str, gradient: Sum, count: float) -> None:
        """Note the sum of a weight's gradient, whose first `reader` is an operator. `count`: instances in all
        blocks."""
        op = self.program.ops[reader]
        sums = self.stops.at(op, BACK).sums
        sums.append(gradient.times(count / self.blocks(op.scope)))
        sums.sort(key=lambda one: -one.sent.operand)

    def add_leaf(self, reader: str, sent: Sent, kinds: Hashable, *, ahead: bool) -> None:
        """Note the gather of a leaf once per step, whose first `reader` is an operator; `ahead`: it consists of
        gathers, which begin early in buckets."""
        op = self.program.ops[reader]
        scope = "" if op.role == "port" else op.scope  # what is fed to blocks is read once, before them
        self._leaves.setdefault(scope, []).append(Leaf(sent, kinds, reader, self.program.order[reader], ahead))

    def leaves(self, scope: str) -> list[Leaf]:
        """The leaves of one block of `scope`, or of all that is outside of blocks (""), in the order in which they are
        read."""
        return sorted(self._leaves.get(scope, ()), key=lambda leaf: leaf.at)

    def more_s(
        self,
        scopes: Mapping[str, Sequence[Pass]],
        exposed: Mapping[str, float],
        way: int,
        contention: float,
        *,
        gathers_first: bool,
    ) -> float:
        """Seconds that program order adds to the aggregate price of the pass `way`.

        `scopes`: by scope ("" for what is outside of blocks) the aggregate passes; `exposed`: the share of their
        background collectives that the aggregate price exposes. `gathers_first`: the first gathers begin with the pass,
        as in a backward right after its forward.

        It may be negative, but the pass takes no less than its scopes with all that may run in the background
        overlapped by all of their work (work.least_s).
        """
        backward, passes = way == BACKWARD, {scope: each[way] for scope, each in scopes.items()}
        aggregate_s = sum(one.work_s + exposed[scope] * one.background_s for scope, one in passes.items())
        if not any(one.background_s + one.after.moving_s for one in passes.values()):
            return 0.0
        # the clock counts those of the first weights, and what comes after the last compute, as exposed
        work_s = sum(one.work_s - one.in_order.all_s - one.after.moving_s for one in passes.values())
        ordered_s = work_s + self._exposed_s(scopes, contention, backward=backward, gathers_first=gathers_first)
        least = sum(least_s(one, contention) for one in passes.values())
        return max(ordered_s, least) - aggregate_s

    def _exposed_s(
        self, scopes: Mapping[str, object], contention: float, *, backward: bool, gathers_first: bool
    ) -> float:
        """Seconds in which the pass, in program order, waits for gathers and gradients, or computes slower because of
        them."""
        runs = [scope for scope in scopes if scope]

        def walked(counts: Sequence[int]) -> float:
            few = dict(zip(runs, counts, strict=True))
            leaves = self._buckets(few) if self.gathers and not backward else ()
            return Clock(self._turns(few, backward=backward), contention, leaves).run(gathers_first=gathers_first)

        return _along([(self.stops.of(scope, BACK), self.blocks(scope)) for scope in runs], walked)

    def _turns(self, walked: Mapping[str, int], *, backward: bool) -> list[Turn]:
        """The operators of a pass in the order in which they run, of each run of blocks as many as are `walked`."""
        way, at_ports = BACK if backward else AHEAD, {self.program.runs[scope].ports[0]: scope for scope in walked}
        outside = self.stops.named("", way)
        found: list[Turn] = []
        for name in sorted((*outside, *at_ports), key=self.program.order.__getitem__, reverse=backward):
            if (scope := at_ports.get(name)) is None:
                found.append(Turn(outside[name]))
                continue
            stops = [*(self.stops.of(scope, AGAIN) if backward else ()), *self.stops.of(scope, way)]
            numbers = range(walked[scope])
            found += [
                Turn(stop, (scope, number)) for number in (reversed(numbers) if backward else numbers) for stop in stops
            ]
        return found

    def _buckets(self, walked: Mapping[str, int]) -> list[LeafBucket]:
        """The gathers of leaves as runtime.leaves fills buckets: in the order in which they are read, those outside of
        blocks first."""
        order = sorted(walked, key=lambda scope: self.program.order[self.program.runs[scope].ports[0]])
        read: list[_Read] = [(leaf, OUTSIDE) for leaf in self.leaves("")]
        for scope in order:
            leaves = self.leaves(scope)
            read += [(leaf, (scope, number)) for number in range(walked[scope]) for leaf in leaves]
        return _in_buckets(read)


def _in_buckets(read: Sequence[_Read]) -> list[LeafBucket]:
    """Leaves, each with the block that reads it first, in buckets as runtime.leaves fills them."""
    found = leaf_buckets(
        read,
        alike=lambda one: one[0].kinds if one[0].ahead else one,  # by itself where it is not gathered
        reader=lambda one: one[1],
        nbytes=lambda one: one[0].sent.nbytes,
    )
    return [_bucket(members) for members in found]


def _bucket(members: Sequence[tuple[Leaf, Hashable]]) -> LeafBucket:
    """Leaves, each with the block that reads it first, as one bucket."""
    return LeafBucket(
        in_one_bucket([leaf.sent for leaf, _ in members]),
        members[0][0].ahead,
        dict.fromkeys(block for _, block in members),
    )


def _along(runs: Sequence[tuple[Sequence[Stop], int]], exposed_s: Callable[[Sequence[int]], float]) -> float:
    """The exposed seconds of a pass over runs of blocks, each with the backward of a block and how many there are, by
    those of passes over fewer: of a long run, MOST are walked through, and each further block takes what the last of
    these added, what is left to wait for after the last compute included."""
    together = [_in_one_bucket(backward, count) for backward, count in runs]
    few = [min(MOST * blocks, count) for blocks, (_, count) in zip(together, runs, strict=True)]
    found = walked_s = exposed_s(few)
    for at, (blocks, (_, count)) in enumerate(zip(together, runs, strict=True)):
        if few[at] < count:
            last = LAST * blocks
            shorter_s = exposed_s([*few[:at], few[at] - last, *few[at + 1 :]])
            found += (count - few[at]) * (walked_s - shorter_s) / last
    return found


def _in_one_bucket(backward: Sequence[Stop], count: int) -> int:
    """How many blocks fill a bucket of gradients, of `count` alike ones; 1 where not even all of them do."""
    found = dict[Hashable, float]()
    for gradient in (gradient for stop in backward for gradient in stop.sums):
        found[gradient.key] = found.get(gradient.key, 0.0) + gradient.sent.nbytes
    block_bytes = max(found.values(), default=0.0)
    return math.ceil(BUCKET_BYTES / block_bytes) if block_bytes < BUCKET_BYTES < count * block_bytes else 1


@dataclass(frozen=True, eq=False, slots=True)
class Line:
    """The operators of a piece, or of one block, in the order of its `forward` and of its `backward`, where what runs
    again of a block comes first; and the `leaves` that it reads."""

    forward: tuple[Stop, ...]
    backward: tuple[Stop, ...]
    block: bool
    leaves: tuple[Leaf, ...] = ()


def longer_s(lines: Sequence[tuple[Line, int]], contention: float, *, opens: bool) -> float:
    """Seconds by which the first forward of such a stage takes longer, as the leaves of each block are gathered while
    the block before it runs, without the copies around that. Those of its first block, and of what is outside of
    blocks, come before (`ahead_s`); a stage that `opens` the step waits for them."""
    if not any(line.leaves for line, _ in lines):
        return 0.0
    gathering, without = (_waits_s(lines, FORWARD, contention, opens=way) for way in (opens, None))
    return max(0.0, gathering - without) + (0.0 if opens else _ahead_s(_few(lines))[1])


def ahead_s(lines: Sequence[tuple[Line, int]]) -> float:
    """Seconds of the collectives of leaves that come before such a stage, which does not open the step: of its first
    block, and of what is outside of blocks. They begin with the last block of the stage before on its place."""
    return _ahead_s(_few(lines))[0] if any(line.leaves for line, _ in lines) else 0.0


def _few(lines: Sequence[tuple[Line, int]]) -> tuple[tuple[Line, int], ...]:
    """Of each run of blocks the first few."""
    return tuple([(line, min(FIRST, count) if line.block else count) for line, count in lines])


@lru_cache(maxsize=1024)
def _ahead_s(few: tuple[tuple[Line, int], ...]) -> tuple[float, float]:
    """Of leaves that come before a stage, the seconds of collectives in the background, and of others."""
    came, _ = _gathered(few, opens=False)
    behind = [bucket for bucket in came if bucket.behind]
    waited_s = sum(part.seconds for part in at_reading(came) if part.axis >= 0)
    return Clock((), 0.0, behind).run(gathers_first=False), waited_s


def waits_s(lines: Sequence[tuple[Line, int]], way: int, contention: float) -> float:
    """Exposed seconds of the pass `way` over a pipeline stage of these pieces in the order of its forward, each so many
    times in a row."""
    return _waits_s(lines, way, contention, opens=None)


def _waits_s(lines: Sequence[tuple[Line, int]], way: int, contention: float, *, opens: bool | None) -> float:
    """`waits_s`, with gathers of leaves as in `longer_s` unless `opens` is None."""
    return _along(
        [(line.backward, count) if line.block else ((), 1) for line, count in lines],
        lambda few: _walked_s(
            tuple([(line, number if line.block else count) for (line, count), number in zip(lines, few, strict=True)]),
            way,
            contention,
            opens,
        ),
    )


@lru_cache(maxsize=1024)  # stages that differ only in how long their long runs are, and equal ones of further cuts
def _walked_s(lines: tuple[tuple[Line, int], ...], way: int, contention: float, opens: bool | None) -> float:
    """`_waits_s` of a stage all blocks of which are run through."""
    backward, turns = way == BACKWARD, list[Turn]()
    for index in reversed(range(len(lines))) if backward else range(len(lines)):
        line, count = lines[index]
        stops = line.backward if backward else line.forward
        for number in range(count):
            turns += [Turn(stop, (index, number) if line.block else OUTSIDE) for stop in stops]
    _, leaves = _gathered(lines, opens=opens) if opens is not None else ((), ())
    return Clock(_without_repeats(turns), contention, leaves).run(gathers_first=False)


def _gathered(lines: Sequence[tuple[Line, int]], *, opens: bool) -> tuple[Sequence[LeafBucket], Sequence[LeafBucket]]:
    """The gathers of leaves before the first forward of a stage, and those beside it: all of one that opens the
    step."""
    read: list[_Read] = [(leaf, OUTSIDE) for line, _ in lines if not line.block for leaf in line.leaves]
    blocks = [
        ((index, number), line) for index, (line, count) in enumerate(lines) if line.block for number in range(count)
    ]
    found = _in_buckets([*read, *((leaf, block) for block, line in blocks for leaf in line.leaves)])
    return ((), found) if opens else by_first_forward(found, (OUTSIDE, *(block for block, _ in blocks[:1])))


def _without_repeats(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of a stage, with what several operators share (Sent.key) once: gathers with the first of these in the
    order of the pass, gradients with the last."""
    gathers = _Repeats([sent for turn in turns for _, sent in turn.stop.takes])
    sends = _Repeats([sent for turn in reversed(turns) for sent in turn.stop.sends[::-1]])
    sums = _Repeats([one.sent for turn in reversed(turns) for one in turn.stop.sums[::-1]])
    if not (gathers.ids or sends.ids or sums.ids):
        return [*turns]
    return [
        Turn(
            replace(
                turn.stop,
                takes=[at for at in turn.stop.takes if at[1] not in gathers],
                sends=[sent for sent in turn.stop.sends if sent not in sends],
                sums=[one for one in turn.stop.sums if one.sent not in sums],
            ),
            turn.block,
        )
        for turn in turns
    ]


class _Repeats:
    """The set of those of `sent` that the stage does not do itself, because an earlier one of them has the same key
    (Sent.key)."""

    def __init__(self, sent: Sequence[Sent]) -> None:
        first: dict[Hashable, Sent] = {}
        self.ids = {id(one) for one in sent if one.key is not None and first.setdefault(one.key, one) is not one}

    def __contains__(self, one: Sent) -> bool:
        return id(one) in self.ids
