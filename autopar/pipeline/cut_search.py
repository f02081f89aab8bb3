"""Local search over cuts: pieces move from stage to stage while the step, timed by the schedule's own order of actions, gets shorter.

`balance` makes the slowest stage as fast as possible. With few microbatches that is not the fastest step: a pipeline fills sooner behind short first stages,
and drains sooner where the last ones are short. From a cut of `balance`, a move gives one piece from one stage to another, and shifts the stages
between them by one piece; or one block less runs again, on a place with several stages also in exchange for one of another stage. All moves are timed at once and the best one
is made, until none gains enough. A stage that has blocks keeps at least one: without blocks, hardly any communication of a stage is overlapped, and prices of that are rough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property

import numpy as np

from autopar.pipeline.filling import Cuts
from autopar.pipeline.in_flight import InFlight
from autopar.pipeline.makespan import KINDS
from autopar.pipeline.orders import StageTime
from autopar.pipeline.stretches import Cost, Pieces

GAIN = 1e-5  # relative: moves that gain less are not worth it
SWEEP, ALL = 1e7, 1e8
"""The work of timing moves, in actions times moves: at most so much in one round, and in all rounds together. Where there is more to do, stages give
pieces to nearby stages only."""

SHIFTS = ((0, 0, 0), (0, -1, 0), (-1, -1, 0), (-1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0), (0, 0, -1), (0, 0, 1))
"""By how many pieces the two ends of a stage may shift: not at all; for a piece that goes to a later stage, those of the giver, of stages between, of the
taker; for a piece that goes to an earlier stage, those of the taker, of stages between, of the giver. And by how many more of its pieces run again."""

LESS, MORE = 7, 8
"""One piece less runs again, and one more."""

TimeOf = Callable[[int, Sequence[Cost], int], StageTime]
"""(stage, its pieces, the number of the piece after its last one) -> its times."""

EndsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""As Timetable.ends_all_s."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A possible stage: seconds of its actions by kind, of a send, and once per step; bytes of parameters and state, that exist only while it runs, that a microbatch in flight keeps, and
    more between the two parts of its backward."""

    took_s: tuple[float, ...]
    send_s: float
    once_s: float
    rest: float
    live: float
    kept: float
    halfway: float


@dataclass(eq=False)
class Shifting:
    """The local search.

        pieces     for each stage, the costs of all pieces on its place
        flying     for each place, the microbatches in flight
        limits     bytes of each place
        at         the place of each stage
        barred     the pieces before which no stage can begin
        blocks     the pieces that are blocks
        time_of    the times of a stage
        ends_of    when each place is done, for many ways at once
        actions    how many actions are simulated to time one way
    """

    pieces: Sequence[Pieces]
    flying: Sequence[InFlight]
    limits: Sequence[float]
    at: Sequence[int]
    barred: Collection[int]
    blocks: Collection[int]
    time_of: TimeOf
    ends_of: EndsOf
    actions: int
    _known: dict[tuple[int, int, int, int], _Stretch] = field(default_factory=dict)

    def shifted(self, cuts: Cuts) -> Cuts:
        """`cuts` after the best moves, as long as they gain; `cuts` themselves where none does."""
        edges, moves = [0, *cuts.bounds, len(self.pieces[0].costs)], self._moves()
        for _ in range(int(ALL / (self.actions * len(moves))) + 1):
            steps_s = self._steps_s(edges, cuts.again, moves)
            best = int(steps_s.argmin())
            if not steps_s[best] < steps_s[0] * (1 - GAIN):
                break
            edges = [0, *(stop + SHIFTS[way][1] for stop, way in zip(edges[1:], moves[best], strict=True))]
            again = [n + SHIFTS[way][2] for n, way in zip(cuts.again, moves[best], strict=True)]
            cuts = Cuts(edges[1:-1], [min(n, b - a) for n, (a, b) in zip(again, itertools.pairwise(edges), strict=True)])
        return cuts

    def _moves(self) -> np.ndarray:
        """[moves, stages]: the shifts of all stages; the first one moves nothing."""
        stages = len(self.at)
        reach = max(1, int(SWEEP / (self.actions * 2 * stages)))
        given = (move for a in range(stages) for b in range(a + 1, min(stages, a + 1 + reach)) for move in _between(a, b, stages))
        return np.array([[0] * stages, *given, *self._exchanged()])

    def _exchanged(self) -> Iterator[list[int]]:
        """The moves by which one piece less of a stage runs again, alone and for one of another stage of its place."""
        for one, at in enumerate(self.at):
            for other in (stage for stage, place in enumerate(self.at) if place == at):
                yield [LESS if stage == one else MORE if stage == other else 0 for stage in range(len(self.at))]

    def _steps_s(self, edges: Sequence[int], again: Sequence[int], moves: np.ndarray) -> np.ndarray:
        """[moves] seconds of a step after each move; infinite where it is impossible, or does not fit."""
        stages = range(len(self.at))
        some = [self._block_between(*ends) for ends in itertools.pairwise(edges)]
        ways = [[self._stretch(stage, edges[stage] + first, edges[stage + 1] + stop, again[stage] + more, some[stage]) for stage in stages] for first, stop, more in SHIFTS]
        there = np.array([[way is not None for way in row] for row in ways])
        numbers = np.array([[(*way.took_s, *astuple(way)[1:]) if way is not None else (0.0,) * (len(KINDS) + 6) for way in row] for row in ways])
        possible = np.flatnonzero(there[moves, stages].all(1))
        each = numbers[moves[possible], stages].transpose(2, 1, 0)  # [numbers, stages, moves]
        took_s, (send_s, once_s, *held) = each[:len(KINDS)], each[len(KINDS):]
        fits = self._fits(*held)
        fits[:1] |= possible[:1] == 0  # the present cut fits, as balance found it
        found = np.full(len(moves), np.inf)
        found[possible[fits]] = (self.ends_of(took_s[..., fits], send_s[:, fits]) + (self._on @ once_s)[:, fits]).max(0)
        return found

    def _fits(self, rest: np.ndarray, live: np.ndarray, kept: np.ndarray, halfway: np.ndarray) -> np.ndarray:
        """[moves] whether every place has room for its stages, and something to train, given their bytes [stages, moves]."""
        fits = np.ones(rest.shape[1], bool)
        for mine, flying, limit in zip(self._on > 0.0, self.flying, self.limits, strict=True):
            held = rest[mine].sum(0)
            fits &= (held + live[mine].max(0) + flying.peak_bytes(kept[mine], halfway[mine]) <= limit) & (held > 0.0)
        return fits

    @cached_property
    def _on(self) -> np.ndarray:
        """[places, stages]: 1 where a stage is on a place."""
        return np.array([[float(place == at) for at in self.at] for place in range(len(self.limits))])

    def _block_between(self, first: int, stop: int) -> bool:
        """Whether some of the pieces `[first, stop)` are blocks."""
        return any(piece in self.blocks for piece in range(first, stop))

    def _stretch(self, stage: int, first: int, stop: int, again: int, some: bool) -> _Stretch | None:
        """A stage of the pieces `[first, stop)`, the first `again` of which run again; None where it is impossible, or has no block though it must have `some`."""
        count, last = len(self.pieces[stage].costs), len(self.at) - 1
        inside = first >= 0 and first < stop <= count and (first == 0) == (stage == 0) and (stop == count) == (stage == last) and again >= 0
        if not inside or first in self.barred or (stop < count and stop in self.barred) or (some and not self._block_between(first, stop)):
            return None
        key = stage, first, stop, min(again, stop - first)
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, stage: int, first: int, stop: int, again: int) -> _Stretch:
        part = [*self.pieces[stage].again[first:first + again], *self.pieces[stage].costs[first + again:stop]]
        time = self.time_of(stage, part, stop)
        once_s, rest, kept, halfway = (sum(getattr(c, name) for c in part) for name in ("once_s", "rest_bytes", "kept_bytes", "halfway_bytes"))
        return _Stretch(tuple(time.of(kind) for kind in KINDS), time.send_s, once_s, rest, max(c.live_bytes for c in part), kept, halfway)


def _between(a: int, b: int, stages: int) -> Iterator[list[int]]:
    """The moves of one piece from stage `a` to `b`, a later one, and back."""
    for giver, between, taker in ((1, 2, 3), (4, 5, 6)):
        yield [0] * a + [giver] + [between] * (b - a - 1) + [taker] + [0] * (stages - b - 1)
