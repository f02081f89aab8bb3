"""What a stage of a pipeline waits for at the beginning and at the end of each pass (`ends_s`): nothing is gathered yet when it begins, and all
gradients that it sends must have arrived when it ends. Both happen once per pass, however many blocks the stage has.

Gathers for the next block begin when a block takes its first gathered weight (runtime.prefetch). Collectives of one mesh axis run in the order in which
they begin, those in the background apart from those that compute waits for (runtime.mesh). In a backward the order of operators is reversed,
except while a block first runs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.deferred_waits import BUCKETS
from autopar.layout import BUCKET_BYTES, SOON
from autopar.prefetching import ends
from autopar.problem.graph import Op, Program
from autopar.problem.hiding import Load

LAST = 1_000
"""Behind all operands."""
BLOCKS = 3
"""Small blocks begin and wait together: at most so many."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A gather of a weight or a scatter of a gradient: its collectives, one after the other, and the bytes of the whole tensor on a rank. `held`: of a gradient, the bytes that wait in
    front of each collective."""

    way: Sequence[Load]
    nbytes: float
    held: Sequence[float] = ()

    def times(self, factor: float) -> Sent:
        """So many of them together."""
        return Sent([load.times(factor) for load in self.way], factor * self.nbytes, [factor * nbytes for nbytes in self.held])


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of a weight's gradient over ranks, in buckets with all others of the same `key`. `first` is the scatter that brings it to its leaf before
    that, which is waited for late (autopar.deferred_waits); None where the backward makes it in the leaf's layout."""

    key: object
    sent: Sent
    first: Sent | None = None

    def times(self, factor: float) -> Sum:
        """So many of them together."""
        return Sum(self.key, self.sent.times(factor), self.first and self.first.times(factor))


@dataclass(eq=False, slots=True)
class Stop:
    """What one operator does in a pass, in this order; seconds are of one block.

        takes        gathered weights that it needs, each with the number of the operand
        waits        collectives that it waits for, each with the number of the operand
        compute_s    compute
        behind       collectives that are waited for after it
        sends        gradients that are scattered from it
        sums         the sums that its gradients belong to
        opens        weights that are needed when nothing has computed yet; they are priced as part of the work
    """

    compute_s: float = 0.0
    opens: list[tuple[int, Sent]] = field(default_factory=list)
    takes: list[tuple[int, Sent]] = field(default_factory=list)
    waits: list[tuple[int, Load]] = field(default_factory=list)
    behind: list[Load] = field(default_factory=list)
    sends: list[Sent] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)

    @property
    def work_s(self) -> float:
        """Seconds of all that is not in the background."""
        return self.compute_s + sum(load.seconds for load in (*(load for _, load in self.waits), *self.behind))

    @property
    def events(self) -> list[Load | None]:
        """In order: None for a weight that is taken, a collective that is waited for."""
        before: list[tuple[int, Load | None]] = [*((operand, None) for operand, _ in self.takes), *self.waits]
        return [load for _, load in sorted(before, key=lambda event: event[0])]


class Stops:
    """Those of all blocks of `program`, or of the operators of the model itself (scope ""), forward and `back`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._found: dict[tuple[str, bool], dict[str, Stop]] = {}

    def at(self, op: Op, *, back: bool) -> Stop:
        """That of one operator, or of what is fed to a block."""
        return self._found.setdefault((op.scope, back), {}).setdefault(op.name, Stop())

    def named(self, scope: str, *, back: bool) -> Mapping[str, Stop]:
        """By the names of operators."""
        return self._found.get((scope, back), {})

    def of(self, scope: str, *, back: bool) -> list[Stop]:
        """Those of the blocks of `scope`, in the order of a forward or of a backward."""
        found = self._found.get((scope, back), {})
        stops = [found[name] for name in self.program.ops if name in found]
        return stops[::-1] if back else stops


def ends_s(stops: Sequence[Stop], blocks: int, contention: float) -> tuple[float, float]:
    """What a pass over so many blocks takes longer than all of them in the middle of others: seconds at its begin, where it waits for its first gathers,
    and at its end, for what it has sent. Each collective that runs then takes its share of the compute units, its `contention`, from nothing that computes."""
    now_s, busy, taken = 0.0, _Axes(), 0
    coming: list[float] = []
    work_s = sum(stop.work_s for stop in stops)
    late: list[Sequence[Load]] = []
    for stop in stops:
        for load in stop.events:
            if load is None and not coming:
                coming, now_s = _begun(stops, blocks, busy, now_s)
            now_s = max(now_s, coming[taken]) if load is None else busy.way([load], now_s, behind=False)
            taken += load is None
        now_s += stop.compute_s
        for load in stop.behind:
            now_s = busy.way([load], now_s, behind=False)
        for sent in stop.sends:
            busy.way(sent.way[:1], now_s)
            late.append(sent.way[1:])
    end_s = max([now_s, *busy.until_s.values()])
    waiting = 1 + int(SOON * BUCKETS * BUCKET_BYTES / max(1.0, sum(sent.nbytes for stop in stops for sent in stop.sends)))
    for _ in range(min(waiting, blocks)):
        end_s = max([end_s, *(busy.way(way, now_s) for way in late)])
    steady_s = max([work_s, *busy.total_s(stops).values()])
    more_s = max(0.0, end_s - steady_s)
    last_s = min(more_s, end_s - now_s)
    ahead, behind = ({load.axis for sent in ways for load in sent.way} for ways in ([sent for stop in stops for _, sent in stop.takes],
                                                                                    [sent for stop in stops for sent in stop.sends]))
    return (more_s - last_s) * max(0.0, 1.0 - contention * len(ahead)), last_s * max(0.0, 1.0 - contention * len(behind))


def _begun(stops: Sequence[Stop], blocks: int, busy: _Axes, now_s: float) -> tuple[list[float], float]:
    """The gathers of a block as they begin with its first one, and those of the blocks behind it that runtime.prefetch begins then: when each of its own has come, and
    when compute goes on, which waits for each collective behind which another one of its gather has begun."""
    ways = [sent.way for stop in stops for _, sent in sorted(stop.takes, key=lambda take: take[0])]
    each_bytes = [sum(sent.nbytes for stop in stops for _, sent in stop.takes)] * blocks
    until = {len(way): ends(each_bytes, 0, len(way)) for way in ways}
    goes_s, come = now_s, [[now_s] * len(ways) for _ in range(max(end for each in until.values() for end in each))]
    for others in (False, True):
        for leg in range(max(until)):
            for block in range(1, len(come)) if others else (0,):
                for number, way in enumerate(ways):
                    if leg < len(way) and block < until[len(way)][leg]:
                        goes_s = max(goes_s, come[block][number] if leg else now_s)
                        come[block][number] = busy.way(way[leg:leg + 1], goes_s)
    return come[0], goes_s


@dataclass(eq=False)
class _Axes:
    """Until when each mesh axis is busy, with what is in the background or is not."""

    until_s: dict[tuple[int, bool], float] = field(default_factory=dict)

    def way(self, loads: Sequence[Load], now_s: float, *, behind: bool = True) -> float:
        """When collectives have ended that begin now, one after the other."""
        for load in loads:
            key = load.axis, behind
            now_s = self.until_s[key] = max(now_s, self.until_s.get(key, 0.0)) + load.seconds
        return now_s

    @staticmethod
    def total_s(stops: Sequence[Stop]) -> dict[tuple[int, bool], float]:
        """How long each is busy with a block."""
        found: dict[tuple[int, bool], float] = {}
        for stop in stops:
            moved = [load for sent in (*(sent for _, sent in stop.takes), *stop.sends) for load in sent.way]
            for behind, loads in ((True, moved), (False, [*(load for _, load in stop.waits), *stop.behind])):
                for load in loads:
                    found[load.axis, behind] = found.get((load.axis, behind), 0.0) + load.seconds
        return found
