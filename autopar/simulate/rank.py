"""One rank: its work as tasks for the event engine, in the order in which the runtime starts it.

    blocks run again    what their backward needs again runs before it, in the order of the forward (runtime.rematerialise)
    reshards            on the stream of their mesh axis; what computes next waits for them (runtime.reshard, runtime.regather)
    gathered weights    their gradients are scattered in the background, at most two buckets' worth of whole gradients at a time
    synced gradients    summed in buckets of 25 MB in reverse order; a bucket starts when its last gradient is there (runtime.gradsync)
    on a CPU            all of it shares the cores, so nothing hides
    on a GPU            collectives on the same level of the cluster share its links, and each takes compute units (Prices.contention)

Operators that are placed on one coordinate of an axis run in a lane of their own; what all ranks do waits for all lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cluster import Mesh
from autopar.codegen.placements import Spot
from autopar.layout import BUCKET_BYTES
from autopar.simulate.engine import Task, Timeline, run
from autopar.simulate.pieces import Piece, Pieces
from autopar.simulate.work import Turn


@dataclass(frozen=True, slots=True)
class Mark:
    """What a task is: the pass that it belongs to, its piece, and the block it runs in (-1: none)."""

    during: str
    piece: Piece
    instance: int = -1


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together: (parameter, instance) of each, and the sums in a row, the first of which runs in the background;
    `gathers` are those of their leaves at the begin of a step, `each` says that the sums run after every microbatch."""

    members: tuple[tuple[str, int], ...]
    sums: tuple[Piece, ...]
    gathers: tuple[Piece, ...] = ()
    each: bool = False


@dataclass(eq=False)
class Rank:
    """Collects the tasks of one rank; `pieces` says on what mesh and device."""

    pieces: Pieces
    tasks: list[Task] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    limit_bytes: float = 2 * BUCKET_BYTES

    def __post_init__(self) -> None:
        self.mesh: Mesh = self.pieces.mesh
        self.shared = self.pieces.prices.overlap == 0.0  # cores that do both
        self.during, self.instance = "forward", -1
        self._waiting: list[int] = []  # what computes next waits for these
        self._last: dict[Spot | None, int] = {}  # of each lane
        self._late: deque[tuple[int, float]] = deque()
        self._started: dict[int, int] = {}

    # -- pieces

    def forward(self, turns: Sequence[Turn]) -> None:
        """The forward of a stage."""
        self.during = "forward"
        for turn in turns:
            self.instance = turn.instance
            self._do(turn.item.forward, turn.item.lane)

    def backward(self, turns: Sequence[Turn], buckets: Sequence[Bucket] = (), part: str = "backward") -> None:
        """The backward of a stage, or its `part` for "inputs" or "weights"; `buckets` start as it goes on."""
        self.during = part
        missing = {member: bucket for bucket in buckets for member in bucket.members}
        left = {id(bucket): len(bucket.members) for bucket in buckets}
        arrivals = _arrivals(turns, missing)
        for index in reversed(range(len(turns))):
            turn = turns[index]
            if index + 1 == len(turns) or (turns[index + 1].unit, turns[index + 1].instance) != (turn.unit, turn.instance):
                self._replay(turns, index, part)
            self.instance = turn.instance
            self._back(turn, part)
            for member in arrivals.get(index, ()):
                bucket = missing[member]
                left[id(bucket)] -= 1
                if not left[id(bucket)]:
                    self.start(bucket)
        while self._late:
            self._waiting.append(self._late.popleft()[0])
        self.finish(buckets)

    def _replay(self, turns: Sequence[Turn], last: int, part: str) -> None:
        """Run again what the backward of the block that ends at `last` needs."""
        first = last
        while first > 0 and (turns[first - 1].unit, turns[first - 1].instance) == (turns[last].unit, turns[last].instance):
            first -= 1
        self.during, self.instance = "recompute", turns[last].instance
        for turn in turns[first:last + 1] if part != "weights" else ():
            self._do(turn.item.replay, turn.item.lane)
        self.during = part

    def _back(self, turn: Turn, part: str) -> None:
        item = turn.item
        if part != "weights":
            self._do(item.again, None)
        share = {"backward": 1.0, "inputs": 1.0 - item.weights, "weights": item.weights}[part]
        if share <= 0.0:
            return
        found = [Piece(p.name, p.kind, p.axis, p.seconds * share, p.nbytes) for p in item.backward] if share < 1.0 else item.backward
        self._do(found[:-1] if item.later else found, item.lane)
        if item.later:
            self._late.append((self._collective(found[-1]), item.held_bytes))
            while sum(nbytes for _, nbytes in self._late) > self.limit_bytes:
                self._waiting.append(self._late.popleft()[0])

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """Gather the leaves of some buckets, one after the other."""
        self.during = "sync"
        for bucket in reversed(buckets):
            self._do(bucket.gathers, None)

    def start(self, bucket: Bucket) -> None:
        """Start the first sum of a bucket in the background."""
        if bucket.sums:
            before, self.during = self.during, "sync"
            self._started[id(bucket)] = self._collective(bucket.sums[0])
            self.during = before

    def finish(self, buckets: Sequence[Bucket]) -> None:
        """Wait for all sums of some buckets; those that were not started start now."""
        for bucket in buckets:
            if id(bucket) not in self._started:
                self.start(bucket)
        self.during = "sync"
        for bucket in buckets:
            if id(bucket) in self._started:
                self._waiting.append(self._started.pop(id(bucket)))
            for piece in bucket.sums[1:]:
                self._waiting.append(self._collective(piece))

    def local(self, piece: Piece, during: str) -> None:
        """Something that the rank does on its own, as the optimizer's step."""
        self.during, self.instance = during, -1
        self._do((piece,), None)

    def _do(self, pieces: Sequence[Piece], lane: Spot | None) -> None:
        for piece in pieces:
            if piece.axis >= 0:
                self._waiting.append(self._collective(piece))
            elif piece.seconds > 0:
                self._compute(piece, lane)

    def _compute(self, piece: Piece, lane: Spot | None) -> None:
        others = [task for spot, task in self._last.items() if spot != lane and (lane is None or spot is None)]
        stream = "compute" if lane is None else f"compute on {lane[1]} of {self.mesh.names[lane[0]]}"
        links = ("cores",) if self.shared else ()
        self._last[lane] = self._add(Task(piece.name, stream, piece.seconds, (*dict.fromkeys((*self._waiting, *others)),), links,
                                          "" if self.shared else "device"), piece)
        if lane is None:
            self._waiting.clear()

    def _collective(self, piece: Piece) -> int:
        axis = self.mesh.axes[piece.axis]
        links = ("cores",) if self.shared else tuple(span.level.name for span in axis.spans)
        after = (*dict.fromkeys((*self._waiting, *self._last.values())),)
        units, takes = ("", 0.0) if self.shared else ("device", self.pieces.prices.contention)
        return self._add(Task(piece.name, axis.name, piece.seconds, after, links, units, takes), piece)

    def _add(self, task: Task, piece: Piece) -> int:
        self.tasks.append(task)
        self.marks.append(Mark(self.during, piece, self.instance))
        return len(self.tasks) - 1

    def run(self) -> Ran:
        """Let the engine run what was collected."""
        return Ran(tuple(self.tasks), tuple(self.marks), run(self.tasks))


@dataclass(frozen=True)
class Ran:
    """Tasks of one rank with what they are and when they ran."""

    tasks: tuple[Task, ...]
    marks: tuple[Mark, ...]
    timeline: Timeline

    @property
    def length_s(self) -> float:
        """Seconds from the first to the last."""
        return self.timeline.length_s

    @cached_property
    def compute_s(self) -> float:
        """Seconds in which the rank computes, collectives inside operators left out."""
        return _covered(self._spans(computing=True))

    @cached_property
    def exposed_s(self) -> float:
        """Seconds in which it does nothing but communicate."""
        return _covered([*self._spans(computing=True), *self._spans(computing=False)]) - self.compute_s

    @cached_property
    def communication_s(self) -> float:
        """Seconds in which it communicates, whatever else it does."""
        return _covered(self._spans(computing=False))

    @cached_property
    def launches(self) -> int:
        """Operators and copies that are started."""
        return sum(mark.piece.kind in ("compute", "copy") for mark in self.marks)

    def _spans(self, *, computing: bool) -> list[tuple[float, float]]:
        return [(a, b) for a, b, mark in zip(self.timeline.begin_s, self.timeline.end_s, self.marks, strict=True)
                if (mark.piece.kind in ("compute", "copy")) == computing]


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one span."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _arrivals(turns: Sequence[Turn], wanted: Mapping[tuple[str, int], Bucket]) -> dict[int, list[tuple[str, int]]]:
    """By position in the forward: the gradients that are complete once the backward has come back to it (their first reader)."""
    first: dict[tuple[str, int], int] = {}
    for index, turn in enumerate(turns):
        for name in turn.item.reads:
            for member in ((name, turn.instance), (name, -1)):
                if member in wanted:
                    first.setdefault(member, index)
    found: dict[int, list[tuple[str, int]]] = {}
    for member, index in first.items():
        found.setdefault(index, []).append(member)
    return found
