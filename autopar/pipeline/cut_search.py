"""Local search over cuts: pieces move from stage to stage while the step, timed by the schedule's own order of actions,
gets shorter.

`balance` makes the slowest stage as fast as possible. With few microbatches that is not the fastest step: a pipeline
fills sooner behind short first stages, and drains sooner where the last ones are short. From a cut of `balance`, or
from the fastest of all where a model has few cuts, and from the fastest of those whose stages get longer from the first
one on (pipeline.ramps), a move gives one piece from one stage to another, and shifts the stages between them by one
piece; or one block less runs again, on a place with several stages also in exchange for one of another stage. All moves
are timed at once and the best one is made, until none gains enough. Between two cuts where little is sent there may be
many where much is: then a cut jumps to where less is sent, so that two stages become one and another one two. A stage
that has blocks keeps at least one: without blocks, hardly any communication of a stage is overlapped, and prices of
that are rough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.pipeline import makespan
from autopar.pipeline.filling import Cuts, piece_ranges
from autopar.pipeline.in_flight import InFlight
from autopar.pipeline.orders import StageTime
from autopar.pipeline.ramps import ramped
from autopar.pipeline.rerun_counts import fitted
from autopar.pipeline.stretches import Cost, Pieces

LEAST_GAIN = 1e-5  # relative to the step: moves that gain less are not made

ROUND_ACTIONS, SEARCH_ACTIONS = 1e7, 1e8
"""The work of timing moves, in simulated actions (actions of a step, times moves): at most so much in one round, and in
all rounds together. Where a round would have more, stages give pieces to nearby stages only, and no cut jumps."""

FEW_CUTS, MOST_REFITTED = 2000, 200
"""Where a model has at most FEW_CUTS cuts they are all timed. Of those, and of jumps, that fit only if some of their
blocks run again, at most MOST_REFITTED are tried at once."""

RAMPED = 4
"""Cuts by profiles (pipeline.ramps) from which the search begins, beside the one that is given."""

SHIFTS = ((0, 0, 0), (0, -1, 0), (-1, -1, 0), (-1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0), (0, 0, -1), (0, 0, 1))
"""By how many pieces the two ends of a stage may shift: not at all; for a piece that goes to a later stage, those of
the giver, of stages between, of the taker; for a piece that goes to an earlier stage, those of the taker, of stages
between, of the giver. And by how many more of its pieces run again."""

NOWHERE = (*makespan.numbers(StageTime(0.0, 0.0)), *[0.0] * 5)
"""The numbers of an impossible stage."""

LESS, MORE = 7, 8
"""One piece less runs again, and one more."""

TimeOf = Callable[[int, Sequence[Cost], float], StageTime]
"""(stage, its pieces, the seconds of a send behind it) -> its times."""

EndsOf = Callable[[np.ndarray], np.ndarray]
"""As Timetable.ends_all_s."""


def are_few(pieces: int, stages: int, barred: Collection[int]) -> bool:
    """Whether all cuts of so many pieces into stages are timed; `barred` as in Shifting."""
    return math.comb(pieces - 1 - len(barred), stages - 1) <= FEW_CUTS


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A possible stage: its `times` (makespan.numbers), and seconds once per step; bytes of parameters and state, that
    exist only while it runs, that a microbatch in flight keeps, and more between the two parts of its backward."""

    times: tuple[float, ...]
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
    sends_s    for each piece, and the end of the model, the seconds of a send where a stage ends in front of it
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
    sends_s: Sequence[float]
    time_of: TimeOf
    ends_of: EndsOf
    actions: int
    _known: dict[tuple[int, int, int, int], _Stretch] = field(default_factory=dict)

    def shifted(self, cuts: Cuts) -> Cuts:
        """`cuts`, or the fastest of all where these are few, or one of the fastest ramps, after the best moves and
        jumps, as long as they gain: the fastest of these ends."""
        left = SEARCH_ACTIONS
        best, best_s = self._fastest_of_all(cuts), math.inf
        for begin in (best, *self._ramps(best)):
            if left > 0:
                end, used = self._descended(begin, left)
                left -= used
                end_s = float(self._timed([end])[0][0])
                best, best_s = (end, end_s) if end_s < best_s * (1 - LEAST_GAIN) else (best, best_s)
        return best

    def _descended(self, cuts: Cuts, most: float) -> tuple[Cuts, float]:
        """`cuts` after the best moves and jumps, as long as they gain and `most` actions are not used up; and how many
        were used."""
        moves, used = self._moves, 0.0
        while used < most:
            used += self.actions * len(moves)
            steps_s = self._steps_s(cuts, moves)
            best = int(steps_s.argmin())
            if steps_s[best] < steps_s[0] * (1 - LEAST_GAIN):
                cuts = self._moved(cuts, moves[best])
                continue
            before, jumps = cuts, self._jumps(cuts.bounds)
            used += self.actions * len(jumps)
            cuts = self._fastest(cuts, jumps)
            if cuts is before:
                break
        return cuts, used

    def _ramps(self, cuts: Cuts) -> list[Cuts]:
        """The RAMPED fastest cuts by profiles that fit and have as many stages with blocks as `cuts`, with as few
        pieces run again as memory allows."""
        seconds = {id(own): [c.micro_s for c in own.costs] for own in self.pieces}
        among = ramped([seconds[id(own)] for own in self.pieces], self._ends)
        ways = self._with_as_many(among, cuts)
        if not ways:
            return []
        steps_s, fits = self._timed(ways)  # as fast as if nothing had to run again
        nearest = [int(index) for index in np.argsort(steps_s, kind="stable")[: 2 * RAMPED]]
        made = (ways[index] if fits[index] else self._fitted(ways[index]) for index in nearest)
        return list(itertools.islice((way for way in made if way is not None), RAMPED))

    def _with_as_many(self, among: Collection[Sequence[int]], cuts: Cuts) -> list[Cuts]:
        """The cuts at the bounds `among`, with nothing run again, that have as many stages with blocks as `cuts`."""
        least, stages = self._with_blocks(cuts.bounds), len(self.at)
        return [Cuts([*bounds], [0] * stages) for bounds in among if self._with_blocks(bounds) >= least]

    def _fitted(self, way: Cuts) -> Cuts | None:
        """`way` with as few pieces run again as memory allows; None where it does not fit."""
        made = fitted(self.pieces, way, self.at, self.flying, self.limits)
        return made if self._timed([made])[1][0] else None

    def _moved(self, cuts: Cuts, move: np.ndarray) -> Cuts:
        """`cuts` after a possible move: the shift of each stage, by its number in SHIFTS."""
        shifts = [SHIFTS[way] for way in move]
        bounds = [bound + stop for bound, (_, stop, _) in zip(cuts.bounds, shifts[:-1], strict=True)]
        return Cuts(
            bounds,
            [
                min(again + more, stop - first)
                for again, (_, _, more), (first, stop) in zip(cuts.again, shifts, self._ranges(bounds), strict=True)
            ],
        )

    @cached_property
    def _ends(self) -> list[int]:
        """The pieces that a stage can begin with, but for the first."""
        return [end for end in range(1, len(self.pieces[0].costs)) if end not in self.barred]

    def _fastest_of_all(self, cuts: Cuts) -> Cuts:
        """The fastest of all cuts, where there are few; `cuts` where none is faster."""
        count, stages = len(self.pieces[0].costs), len(self.at)
        if not are_few(count, stages, self.barred):
            return cuts
        return self._fastest(cuts, list(itertools.combinations(self._ends, stages - 1)))

    def _jumps(self, bounds: Sequence[int]) -> list[tuple[int, ...]]:
        """The other bounds that differ from `bounds` in one, in place of which less is sent; none where timing them is
        too much work."""
        less = [
            (bound, end)
            for bound in bounds
            for end in self._ends
            if end not in bounds and self.sends_s[end] < self.sends_s[bound]
        ]
        if self.actions * len(less) > ROUND_ACTIONS:
            return []
        return [tuple(sorted({*bounds, end} - {bound})) for bound, end in less]

    def _fastest(self, cuts: Cuts, among: Collection[Sequence[int]]) -> Cuts:
        """The fastest of the cuts at one of the bounds `among` that fit and have as many stages with blocks as `cuts`;
        with as few pieces run again as memory allows. `cuts` where none is faster."""
        count, stages, ways = len(self.pieces[0].costs), len(self.at), self._with_as_many(among, cuts)
        if not ways:
            return cuts
        best_s, tried = float(self._timed([cuts])[0][0]), 0
        steps_s, fits = self._timed(ways)  # as fast as if nothing had to run again
        gaining = [index for index in np.argsort(steps_s, kind="stable") if steps_s[index] < best_s * (1 - LEAST_GAIN)]
        if not gaining:
            return cuts
        _, possible = self._timed([Cuts(ways[index].bounds, [count] * stages) for index in gaining])
        for index, may_fit in zip(gaining, possible, strict=True):
            if not steps_s[index] < best_s * (1 - LEAST_GAIN) or tried == MOST_REFITTED:
                break
            if fits[index]:
                return ways[index]
            if may_fit:
                tried += 1
                made = self._fitted(ways[index])
                made_s = float(self._timed([made])[0][0]) if made is not None else math.inf
                cuts, best_s = (made, made_s) if made is not None and made_s < best_s else (cuts, best_s)
        return cuts

    def _with_blocks(self, bounds: Sequence[int]) -> int:
        """How many stages have blocks."""
        return sum(self._block_between(first, stop) for first, stop in self._ranges(bounds))

    def steps_s(self, ways: Sequence[Cuts]) -> np.ndarray:
        """[ways] seconds of a step, for possible cuts; infinite where they do not fit."""
        steps_s, fits = self._timed(ways)
        return np.where(fits, steps_s, np.inf)

    def _timed(self, ways: Sequence[Cuts]) -> tuple[np.ndarray, np.ndarray]:
        """[ways] seconds of a step, and whether every place has room for its stages, for possible cuts."""
        made = [
            [
                self._stretch(stage, first, stop, again, some=False)
                for stage, ((first, stop), again) in enumerate(zip(self._ranges(way.bounds), way.again, strict=True))
            ]
            for way in ways
        ]
        numbers = np.array([[_numbers(stretch) for stretch in stretches] for stretches in made]).transpose(2, 1, 0)
        return self._steps_of(numbers), self._fits(*numbers[-4:])

    def _ranges(self, bounds: Sequence[int]) -> list[tuple[int, int]]:
        """Of each stage, the number of its first piece and of the piece after its last one, for stages 1, 2, ... that
        begin at `bounds` (Cuts.bounds)."""
        return piece_ranges(bounds, len(self.pieces[0].costs))

    @cached_property
    def _moves(self) -> np.ndarray:
        """[moves, stages]: the shifts of all stages; the first one moves nothing."""
        stages = len(self.at)
        reach = max(1, int(ROUND_ACTIONS / (self.actions * 2 * stages)))
        given = (
            move
            for a in range(stages)
            for b in range(a + 1, min(stages, a + 1 + reach))
            for move in _between(a, b, stages)
        )
        return np.array([[0] * stages, *given, *self._exchanged()])

    def _exchanged(self) -> Iterator[list[int]]:
        """The moves by which one piece less of a stage runs again, alone and for one of another stage of its place."""
        for one, at in enumerate(self.at):
            for other in (stage for stage, place in enumerate(self.at) if place == at):
                yield [LESS if stage == one else MORE if stage == other else 0 for stage in range(len(self.at))]

    def _steps_s(self, cuts: Cuts, moves: np.ndarray) -> np.ndarray:
        """[moves] seconds of a step after each move from `cuts`; infinite where it is impossible, or does not fit."""
        stages, here = range(len(self.at)), self._ranges(cuts.bounds)
        some = [self._block_between(first, stop) for first, stop in here]
        ways = [
            [
                self._stretch(
                    stage,
                    here[stage][0] + first,
                    here[stage][1] + stop,
                    cuts.again[stage] + more,
                    some=some[stage],
                )
                for stage in stages
            ]
            for first, stop, more in SHIFTS
        ]
        there = np.array([[way is not None for way in row] for row in ways])
        numbers = np.array([[_numbers(way) for way in row] for row in ways])
        possible = np.flatnonzero(there[moves, stages].all(1))
        each = numbers[moves[possible], stages].transpose(2, 1, 0)  # [numbers, stages, moves]
        fits = self._fits(*each[-4:])
        fits[:1] |= possible[:1] == 0  # the present cut fits, as balance found it
        found = np.full(len(moves), np.inf)
        found[possible[fits]] = self._steps_of(each[..., fits])
        return found

    def _steps_of(self, numbers: np.ndarray) -> np.ndarray:
        """[ways] seconds of a step, given the numbers of `_numbers` [numbers, stages, ways]."""
        return np.asarray((self.ends_of(numbers[:-5]) + self._is_on @ numbers[-5]).max(0))

    def _fits(self, rest: np.ndarray, live: np.ndarray, kept: np.ndarray, halfway: np.ndarray) -> np.ndarray:
        """[moves] whether every place has room for its stages, and something to train, given their bytes [stages,
        moves]."""
        fits = np.ones(rest.shape[1], bool)
        for mine, flying, limit in zip(self._is_on > 0.0, self.flying, self.limits, strict=True):
            held = rest[mine].sum(0)
            fits &= (held + live[mine].max(0) + flying.peak_bytes(kept[mine], halfway[mine]) <= limit) & (held > 0.0)
        return fits

    @cached_property
    def _is_on(self) -> np.ndarray:
        """[places, stages]: 1 where a stage is on a place."""
        return np.array([[float(place == at) for at in self.at] for place in range(len(self.limits))])

    def _block_between(self, first: int, stop: int) -> bool:
        """Whether some of the pieces `[first, stop)` are blocks."""
        return any(piece in self.blocks for piece in range(first, stop))

    def _stretch(self, stage: int, first: int, stop: int, again: int, *, some: bool) -> _Stretch | None:
        """A stage of the pieces `[first, stop)`, the first `again` of which run again; None where it is impossible, or
        has no block though it must have `some`."""
        count, last = len(self.pieces[stage].costs), len(self.at) - 1
        inside = (
            first >= 0
            and first < stop <= count
            and (first == 0) == (stage == 0)
            and (stop == count) == (stage == last)
            and again >= 0
        )
        if (
            not inside
            or first in self.barred
            or (stop < count and stop in self.barred)
            or (some and not self._block_between(first, stop))
        ):
            return None
        key = stage, first, stop, min(again, stop - first)
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, stage: int, first: int, stop: int, again: int) -> _Stretch:
        """A possible stage of the pieces `[first, stop)`, the first `again` of which run again."""
        part = [*self.pieces[stage].again[first : first + again], *self.pieces[stage].costs[first + again : stop]]
        time = self.time_of(stage, part, self.sends_s[stop])
        once_s, rest, kept, halfway = (
            sum(getattr(c, name) for c in part) for name in ("once_s", "rest_bytes", "kept_bytes", "halfway_bytes")
        )
        return _Stretch(
            makespan.numbers(time),
            once_s,
            rest,
            max(c.live_bytes for c in part),
            kept,
            halfway,
        )


def _numbers(stretch: _Stretch | None) -> tuple[float, ...]:
    """The fields of a stretch in a row, zeros where it is impossible: its times, seconds once per step, and its bytes
    of four kinds."""
    if stretch is None:
        return NOWHERE
    return (*stretch.times, stretch.once_s, stretch.rest, stretch.live, stretch.kept, stretch.halfway)


def _between(a: int, b: int, stages: int) -> Iterator[list[int]]:
    """The moves of one piece from stage `a` to `b`, a later one, and back."""
    for giver, between, taker in ((1, 2, 3), (4, 5, 6)):
        yield [0] * a + [giver] + [between] * (b - a - 1) + [taker] + [0] * (stages - b - 1)
