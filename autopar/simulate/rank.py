"""A simulated rank: its work as tasks for the event engine, in the order in which the runtime starts it.

    blocks run again    what their backward needs again runs before it, in the order of the forward
                        (runtime.rematerialise)
    inside operators    collectives that an operator waits for are on the stream of their mesh axis as reshards are;
                        what shows of others is compute
    reshards            on the stream of their mesh axis; what computes next waits for them (runtime.reshard,
                        runtime.regather)
    in the background   on a stream of their own beside it (runtime.mesh)
    gathered weights    ahead of the block that needs them, where the one before it begins (runtime.prefetch); their
                        gradients are scattered in the background (autopar.deferred_waits)
    leaves              gathered in buckets of 25 MB in the order of use, those of a block while the one before it runs;
                        a block waits for its own (runtime.leaves)
    synced gradients    summed in buckets of 25 MB in reverse order; a bucket starts when its last gradient is there
                        (runtime.gradsync)
    over several axes   one collective after the other, each begun where the rank has come on by a block or a bucket
                        (pipeline.chains)
    on a CPU            all of it shares the cores, so nothing hides, unless a calibration found that some of it does
                        (Device.contention)
    on a GPU            collectives on the same level of the cluster share its links, and each takes compute units
                        (Prices.contention)

Operators that are placed on one coordinate of an axis run in a lane of their own; what all ranks do waits for all
lanes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.buckets import BUCKET_BYTES
from autopar.cluster import Mesh
from autopar.codegen.edges import Spot
from autopar.cost.comm import link_shares
from autopar.deferred_waits import BUCKETS, Queue
from autopar.pipeline.chains import Ahead, Chain, Fetch, LeafBucket, Leaves, Scatter, Sums
from autopar.simulate.engine import Task, Timeline, run
from autopar.simulate.pieces import Piece, Pieces
from autopar.simulate.sync import GradientBucket
from autopar.simulate.work import Turn


@dataclass(frozen=True, slots=True)
class Mark:
    """What a task stands for: the pass that it belongs to ("forward", "backward", "recompute", "sync", ...), its piece,
    and the number of its block (-1: none)."""

    during: str
    piece: Piece
    instance: int = -1


@dataclass(eq=False)
class Rank:
    """One rank: its methods append the tasks of what the runtime would do, in order; `run` executes them. `pieces` has
    its mesh and device; `marks[i]` says what task i stands for."""

    pieces: Pieces
    tasks: list[Task] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mesh: Mesh = self.pieces.mesh
        self.shared = self.pieces.prices.overlap == 0.0  # compute and communication share the cores
        self.during, self.instance = "forward", -1
        self._waiting: list[int] = []  # tasks that the next compute waits for
        self._last: dict[Spot | None, int] = {}  # the last compute task of each lane
        self._late: Queue[Scatter] = Queue(BUCKETS * BUCKET_BYTES)
        self._sums: Queue[Sums] = Queue(BUCKET_BYTES)
        self._started: dict[int, Chain] = {}
        self._ahead = Ahead(self, [])
        self._leaves = Leaves(self, [])
        self._left: dict[int, int] = {}  # id of a bucket -> how many of its gradients have not arrived

    # -- pieces

    def forward(self, turns: Sequence[Turn]) -> None:
        """Append the forward of a stage."""
        self.during, self._ahead = (
            "forward",
            Ahead(self, [Fetch(t.item.forward, t.item.full_bytes, _unit(t)) for t in turns if t.item.fetches]),
        )
        for index, turn in enumerate(turns):
            self.instance = turn.instance
            if turn.instance >= 0 and index == _first(turns, index):
                self._leaves.fill(_unit(turn))
            self._moved(turn, turn.item.forward)
        self._leaves.fill_all()

    def backward(
        self,
        turns: Sequence[Turn],
        buckets: Sequence[GradientBucket] = (),
        part: str = "backward",
        *,
        at_once: bool = False,
    ) -> None:
        """Append the backward of a stage, or its `part` "inputs" or "weights". The reductions of `buckets` start in it,
        as their gradients arrive (`finish` ends them). `at_once`: it follows its forward directly, so that its first
        gathers begin with it."""
        self.during, self._ahead = part, Ahead(self, _fetches_back(turns) if part != "weights" else [])
        if at_once:
            self._ahead.go_on()
        missing = {member: bucket for bucket in buckets for member in bucket.members}
        self._left = {id(bucket): len(bucket.members) for bucket in buckets}
        arrivals = _arrivals(turns, missing)
        for index in reversed(range(len(turns))):
            turn = turns[index]
            if index + 1 == len(turns) or (turns[index + 1].unit, turns[index + 1].instance) != (
                turn.unit,
                turn.instance,
            ):
                self._replay(turns, index, part)
            self.instance = turn.instance
            self._back(turn, part, [missing[member] for member in arrivals.get(index, ())])
        self._late.drain()

    def _arrived(self, buckets: Sequence[GradientBucket]) -> None:
        """One more gradient of each of these buckets has arrived; start the buckets that are full."""
        for bucket in buckets:
            self._left[id(bucket)] -= 1
            if not self._left[id(bucket)]:
                self.start(bucket)

    def _replay(self, turns: Sequence[Turn], last: int, part: str) -> None:
        """Recompute what the backward of the block that ends at `last` needs."""
        self.during, self.instance = "recompute", turns[last].instance
        for turn in turns[_first(turns, last) : last + 1] if part != "weights" else ():
            self._moved(turn, turn.item.replay)
        self.during = part

    def _moved(self, turn: Turn, pieces: Sequence[Piece]) -> None:
        """Append the pieces of an item of a forward or a recomputation; wait for its gather if that was prefetched."""
        if turn.item.fetches and pieces:
            self._ahead.take()
        else:
            self._do(pieces, turn.item.lane)

    def _back(self, turn: Turn, part: str, buckets: Sequence[GradientBucket]) -> None:
        """The backward of an item, after which one gradient of each of `buckets` has arrived."""
        item = turn.item
        if part != "weights":
            for _ in item.again:
                self._ahead.take()
        share = {"backward": 1.0, "inputs": 1.0 - item.weights, "weights": item.weights}[part]
        if share <= 0.0:
            self._arrived(buckets)
            return
        found = [replace(p, seconds=p.seconds * share) for p in item.backward] if share < 1.0 else item.backward
        if not item.later:
            self._do(found, item.lane)
            self._arrived(buckets)
            return
        scatter = Scatter(self, found, item.held_bytes, lambda: self._arrived(buckets))
        scatter.next()
        self._late.add(scatter, _unit(turn))

    def gather(self, buckets: Sequence[LeafBucket]) -> None:
        """Start to gather leaves, and wait for those that the model itself reads; a block waits for its own when it
        runs."""
        self._leaves = Leaves(self, buckets)
        self._leaves.go_on()
        self._leaves.fill(None)

    def start(self, bucket: GradientBucket) -> None:
        """Start the reduction of a bucket in the background."""
        if bucket.sums:
            sums = self._started[id(bucket)] = Sums(self, bucket.sums, bucket.held, "sync")
            if sums.go_on():
                self._sums.add(sums, bucket.block or bucket)

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """Wait for the reductions of `buckets`; those that were not started are started now."""
        for bucket in buckets:
            if id(bucket) not in self._started:
                self.start(bucket)
        self._sums.drain()
        for bucket in buckets:
            if id(bucket) in self._started:
                self._started.pop(id(bucket)).finish()
        self.during = "sync"

    def local(self, piece: Piece, during: str) -> None:
        """Run local work, such as the optimizer's step."""
        self.during, self.instance = during, -1
        self._do((piece,), None)

    def do(self, parts: Sequence[Piece], during: str = "") -> None:
        """Run pieces one after the other, on all lanes, for the pass `during` ("": the running one)."""
        before, self.during = self.during, during or self.during
        self._do(parts, None)
        self.during = before

    def collective(self, part: Piece, during: str = "") -> int:
        """Start a collective in the background, for the pass `during` ("": the running one); gives the number of its
        task."""
        before, self.during = self.during, during or self.during
        task = self._collective(part, behind=True)
        self.during = before
        return task

    def wait(self, begun: int) -> None:
        """Let the next compute wait for a task."""
        self._waiting.append(begun)

    def _do(self, pieces: Sequence[Piece], lane: Spot | None) -> None:
        """Append pieces on one lane."""
        for piece in pieces:
            if piece.axis >= 0:
                self._waiting.append(self._collective(piece))
            elif piece.seconds > 0:
                self._compute(piece, lane)

    def _compute(self, piece: Piece, lane: Spot | None) -> None:
        """Append local work: after all that compute waits for, on one lane or (None) on all of them."""
        others = [task for spot, task in self._last.items() if spot != lane and (lane is None or spot is None)]
        stream = "compute" if lane is None else f"compute on {lane[1]} of {self.mesh.names[lane[0]]}"
        links = ("cores",) if self.shared else ()
        self._last[lane] = self._add(
            Task(
                piece.name,
                stream,
                piece.seconds,
                (*dict.fromkeys((*self._waiting, *others)),),
                links,
                "" if self.shared else "device",
            ),
            piece,
        )
        if lane is None:
            self._waiting.clear()

    def _collective(self, piece: Piece, *, behind: bool = False) -> int:
        """Append a collective, in the background (`behind`) or waited for. Returns the number of its task."""
        axis = self.mesh.axes[piece.axis]
        links = {"cores": 1.0} if self.shared else link_shares(piece.kind, piece.nbytes, axis)
        after = (*dict.fromkeys((*self._waiting, *self._last.values())),)
        units, takes = ("", 0.0) if self.shared else ("device", self.pieces.prices.contention)
        stream = f"{axis.name} behind" if behind else axis.name  # runtime.mesh has a group for each
        return self._add(
            Task(piece.name, stream, piece.seconds, after, tuple(links), units, takes, tuple(links.values())), piece
        )

    def _add(self, task: Task, piece: Piece) -> int:
        """Append a task with its mark. Returns its number."""
        self.tasks.append(task)
        self.marks.append(Mark(self.during, piece, self.instance))
        return len(self.tasks) - 1

    def run(self) -> Ran:
        """Run all tasks that were appended."""
        return Ran(tuple(self.tasks), tuple(self.marks), run(self.tasks))


@dataclass(frozen=True)
class Ran:
    """The tasks of one rank after they have run: what each stands for (`marks`), and when it ran."""

    tasks: tuple[Task, ...]
    marks: tuple[Mark, ...]
    timeline: Timeline

    @cached_property
    def length_s(self) -> float:
        """Seconds from the first to the last."""
        return self.timeline.length_s

    @cached_property
    def begun(self) -> Ran:
        """All but the sums of gradients, and the copies around these that come before its end."""
        ends_s = [end for end, mark in zip(self.timeline.end_s, self.marks, strict=True) if mark.during != "sync"]
        kept = [
            index
            for index, (begin, mark) in enumerate(zip(self.timeline.begin_s, self.marks, strict=True))
            if mark.during != "sync" or (mark.piece.axis < 0 and begin < max(ends_s, default=0.0))
        ]
        begin_s, end_s = (tuple([each[i] for i in kept]) for each in (self.timeline.begin_s, self.timeline.end_s))
        tasks, marks = tuple([self.tasks[i] for i in kept]), tuple([self.marks[i] for i in kept])
        return Ran(tasks, marks, Timeline(begin_s, end_s))

    @property
    def sums(self) -> list[tuple[float, float]]:
        """The (begin, end) of the collectives that sum gradients."""
        times = zip(self.timeline.begin_s, self.timeline.end_s, self.marks, strict=True)
        return [(begin, end) for begin, end, mark in times if mark.during == "sync" and mark.piece.axis >= 0]

    @cached_property
    def compute_s(self) -> float:
        """Seconds in which the rank computes, collectives inside operators left out."""
        return covered(self._spans(computing=True))

    @cached_property
    def exposed_s(self) -> float:
        """Seconds in which the rank communicates and does not compute."""
        return covered([*self._spans(computing=True), *self._spans(computing=False)]) - self.compute_s

    @cached_property
    def communication_s(self) -> float:
        """Seconds in which the rank communicates, beside compute or not."""
        return covered(self._spans(computing=False))

    @cached_property
    def launches(self) -> int:
        """The number of operators and copies that are launched."""
        return sum(mark.piece.kind in ("compute", "copy") for mark in self.marks)

    def _spans(self, *, computing: bool) -> list[tuple[float, float]]:
        """The (begin, end) of all tasks that compute, or of all others."""
        return [
            (a, b)
            for a, b, mark in zip(self.timeline.begin_s, self.timeline.end_s, self.marks, strict=True)
            if (mark.piece.kind in ("compute", "copy")) == computing
        ]


def _unit(turn: Turn) -> Hashable:
    """The unit of the gathers of an item (runtime.prefetch): its block, or outside of blocks the item itself."""
    return (turn.unit, turn.instance) if turn.instance >= 0 else id(turn)


def _first(turns: Sequence[Turn], last: int) -> int:
    """The position of the first item of the block (or operator) whose last item is at `last`."""
    first = last
    while first > 0 and (turns[first - 1].unit, turns[first - 1].instance) == (turns[last].unit, turns[last].instance):
        first -= 1
    return first


def _fetches_back(turns: Sequence[Turn]) -> list[Fetch]:
    """The gathers of a backward in order: those of recomputed blocks, and weights that are gathered again."""
    found, last = list[Fetch](), len(turns) - 1
    while last >= 0:
        first = _first(turns, last)
        here = turns[first : last + 1]
        found += [Fetch(t.item.replay, t.item.full_bytes, _unit(t)) for t in here if t.item.fetches and t.item.replay]
        found += [Fetch(pieces, nbytes, _unit(t)) for t in reversed(here) for pieces, nbytes in t.item.again]
        last = first - 1
    return found


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one span."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _arrivals(
    turns: Sequence[Turn], wanted: Mapping[tuple[str, int], GradientBucket]
) -> dict[int, list[tuple[str, int]]]:
    """Position in the forward -> the parameters whose gradients are complete after the backward of that position: it
    has their first reader."""
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
