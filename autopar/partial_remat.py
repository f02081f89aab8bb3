"""Partial rematerialisation of a plan of one stage and one microbatch: which results blocks keep, and how many blocks
are run again. Called by bestfirst and onestage.

A level (problem.remat.LEVELS) fixes what blocks keep and runs all of them again. In between, the first n of the N
blocks of a run can be run again (`Stage.again`), and what they keep can be any corner of the trade-off of seconds
against bytes (problem.remat_frontier); or all are, and the others keep another corner (`Plan.parted`): a line between
two corners is below the lines from both to blocks that are not run again. Running n blocks again is priced at n/N of
the seconds that all N take, and saves n/N of the bytes. A plan has to fit by two counts: that of the Problem,
interpolated so, and the walk over the program as it runs.

`filled` does this for given choices. `by_bytes` also makes the choices: it solves a Problem without a memory limit in
which every byte costs the seconds that running all blocks again would take to save it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial

from autopar.candidate import Candidate
from autopar.pipeline.single_stage import step_cost
from autopar.planner import Planner
from autopar.problem.build import Model
from autopar.problem.remat import rematerialised
from autopar.problem.remat_choices import choices
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Cost, Solution
from autopar.recipes.free import space
from autopar.search import ilp

BETTER = 1e-9
"""Relative: smaller differences of seconds are rounding."""

DEARER = (1.0, 4.0, 16.0)
"""Factors on the price of a byte, tried in order: where memory is very short, choices that take fewer bytes have to be
made."""


@dataclass(frozen=True)
class Rerun:
    """How one run of blocks is run again: the first `count` blocks keep the results of the nodes `kept`; the others
    those of `rest`, or are not run again (None)."""

    kept: tuple[str, ...]
    count: int
    rest: tuple[str, ...] | None = None


Reruns = Mapping[str, Rerun]
"""The Rerun of each run of blocks, by scope."""


def filled(
    planner: Planner, found: Candidate, below_s: float = math.inf, late: Callable[[], bool] = lambda: False
) -> Candidate:
    """`found`, or the same choices with fewer blocks run again or more results kept, as is fastest within memory; once
    `late`, the fastest so far.

    Nothing is looked for where the user asked for a level of rematerialisation, or where no way could take less than
    `below_s`.
    """
    if not found.remat or planner.request.remat != "auto":
        return found
    filling = _Filling(planner, found, late)
    if late() or filling.plain_s >= below_s or (ways := filling.fastest()) == filling.all:
        return found
    return filling.made(ways)


def by_bytes(
    planner: Planner, sizes: tuple[int, ...], below_s: float, time_limit_s: float, late: Callable[[], bool]
) -> Candidate | None:
    """The free search on a mesh with a price of bytes in place of a memory limit (see the module docstring), filled;
    `late` as in `filled`.

    Higher prices (DEARER) follow while the result does not fit. None where nothing fits, or nothing may take less than
    `below_s`. Each Problem is solved in at most `time_limit_s`.
    """
    level = planner.model(sizes, space(sizes), "search")
    again, roomy = level.with_limit(math.inf).problem, level.plainly.with_limit(math.inf).problem.barred(level.problem)
    first = ilp.glance(roomy, time_limit_s=time_limit_s, cutoff_s=below_s)
    less, more = roomy.price(first.choice), again.price(first.choice)
    if first.bound_s >= below_s or more.memory_bytes >= less.memory_bytes:
        return None
    byte_s = max(0.0, more.time_s - less.time_s) / (less.memory_bytes - more.memory_bytes)
    for dear in DEARER:
        filling = _Filling(
            planner,
            _whole(planner, level, ilp.glance(roomy.paid(dear * byte_s), time_limit_s=time_limit_s).choice),
            late,
        )
        if filling.plain_s >= below_s:
            return None
        if filling.fits(ways := filling.fastest()):
            return filling.made(ways)
    return None


def _whole(planner: Planner, level: Model, choice: tuple[int, ...]) -> Candidate:
    """The Candidate with these choices in which all blocks are run again and keep nothing, whether it fits or not."""
    mesh, remat = level.prices.mesh, planner.levels("full")
    timed = partial(step_cost, forward=planner.forward(mesh))
    model = rematerialised(level.plainly, planner.forward(mesh), remat)
    return Candidate(
        "search",
        mesh,
        model.with_limit(planner.request.limit_bytes),
        Solution(choice, "ilp"),
        timed(model.with_limit(math.inf), choice),
        remat=remat,
        timed=timed,
    )


@dataclass(eq=False)
class _Filling:
    """The search for the fastest Reruns of the blocks of a Candidate; its choices of layouts stay. Once `late`, what
    was found by then is the answer."""

    planner: Planner
    found: Candidate
    late: Callable[[], bool]
    _costs: dict[tuple[tuple[str, tuple[str, ...]], ...], Cost] = field(default_factory=dict)
    _peaks: dict[tuple[tuple[tuple[str, Rerun], ...], tuple[str, ...]], float] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Model:
        """The Candidate's Problem with nothing run again, and without a memory limit."""
        return self.found.model.plainly.with_limit(math.inf)

    @cached_property
    def forward(self) -> ForwardPrices:
        """Prices of the forward on its mesh."""
        return self.planner.forward(self.found.mesh)

    @property
    def plain_s(self) -> float:
        """Seconds of a step in which nothing is run again: a lower bound for all ways."""
        return self._cost({}).time_s

    @property
    def all(self) -> Reruns:
        """The Candidate's own Reruns, with all blocks run again."""
        return {scope: Rerun(tuple(kept), self._blocks(scope)) for scope, kept in self.found.remat.items()}

    def fastest(self) -> Reruns:
        """The fastest Reruns that fit, found greedily: run after run, each of which takes what room the runs before it
        leave. First some blocks keep a corner of what they may keep and the others are not run again; then the others
        may keep a later corner. Where nothing fits and is faster it is `all`, which may not fit."""
        best = dict(self.all)
        for scope in best:
            corners = choices(self.plain, self.forward, self.found.solution.choice, scope).corners
            for hoped_s, at_least, way in self._hoped(best, scope, [Rerun(corner.kept, 0) for corner in corners]):
                if self.late() or (hoped_s >= self.cost(best).time_s * (1 - BETTER) and self.fits(best)):
                    break
                best[scope] = self._fewest(best, scope, way, at_least) or best[scope]
            pairs = [Rerun(less.kept, 0, more.kept) for less, more in itertools.combinations(corners, 2)]
            for sure_s, (at_least, at_most), way in sorted(
                self._sure(best, scope, pairs), key=lambda each: (each[0], each[1][1])
            ):
                if self.late() or sure_s >= self.cost(best).time_s * (1 - BETTER):
                    break
                best[scope] = self._fewest_of_two(best, scope, way, at_least, at_most) or best[scope]
        return best

    def _hoped(self, ways: Reruns, scope: str, among: Sequence[Rerun]) -> list[tuple[float, int, Rerun]]:
        """Of those ways to run `scope` again that fit by the Problem's count: the seconds that it promises, the fewest
        blocks by it, and the way; the most promising first."""
        counted = ((self._counted(ways, scope, way), way) for way in among if not self.late())
        least = [
            (self.cost({**ways, scope: replace(way, count=count)}).time_s, number, count, way)
            for number, (count, way) in enumerate(counted)
            if count is not None
        ]
        return [(hoped_s, count, way) for hoped_s, _, count, way in sorted(least, key=lambda each: each[:2])]

    def made(self, ways: Reruns) -> Candidate:
        """The Candidate under `ways`, with its Problem, cost and peak."""
        walked = self._walked(ways)
        model = rematerialised(self.plain, self.forward, walked.remat).with_limit(
            self.found.model.problem.memory_limit_bytes
        )
        return replace(
            walked, model=model, solution=replace(self.found.solution, bound_s=0.0, optimal=False), cost=self.cost(ways)
        )

    def fits(self, ways: Reruns) -> bool:
        """Whether `ways` fit in memory by both counts: the Problem's and the walk's."""
        limit_bytes = self.planner.request.limit_bytes
        return self.cost(ways).memory_bytes <= limit_bytes and self._walked(ways).peak <= limit_bytes

    def _walked(self, ways: Reruns) -> Candidate:
        """The Candidate under `ways` with its peak; Problem and cost are still those of `found`."""
        remat = {scope: way.kept for scope, way in ways.items() if way.count}
        again = {scope: ways[scope].count for scope in remat if ways[scope].count < self._blocks(scope)}
        rest = {scope: kept for scope in again for kept in [ways[scope].rest] if kept is not None}
        return self.planner.counted(replace(self.found, remat=remat, again=again, rest=rest))

    def cost(self, ways: Reruns) -> Cost:
        """The Cost of a step under `ways`: interpolated, for each run, between its blocks run again in the one way and
        in the other, or not at all."""
        remat: dict[str, tuple[str, ...]] = {}
        found = before = self._cost(remat)
        for scope, way in ways.items():
            after, share = self._cost({**remat, scope: way.kept}), way.count / self._blocks(scope)
            found = _sum(found, share, after, before)
            if way.rest is not None:
                found = _sum(found, 1 - share, self._cost({**remat, scope: way.rest}), before)
            remat, before = {**remat, scope: way.kept}, after
        return found

    def _cost(self, remat: Mapping[str, tuple[str, ...]]) -> Cost:
        """The Cost of a step in which all blocks of the runs in `remat` are run again, and no others; found once."""
        key = tuple(remat.items())
        if key not in self._costs:
            self._costs[key] = step_cost(
                rematerialised(self.plain, self.forward, remat), self.found.solution.choice, self.forward
            )
        return self._costs[key]

    def _blocks(self, scope: str) -> int:
        """The number of blocks of a run."""
        return self.planner.program.runs[scope].count

    def _counted(self, ways: Reruns, scope: str, way: Rerun) -> int | None:
        """The fewest blocks of a run that have to keep `way.kept`, by the Problem's count; None where not even all are
        enough."""
        limit_bytes, last = self.planner.request.limit_bytes, self._blocks(scope)
        found = bisect_left(
            range(last + 1),
            True,
            key=lambda count: self.cost({**ways, scope: replace(way, count=count)}).memory_bytes <= limit_bytes,
        )
        return found if found <= last else None

    def _fewest(self, ways: Reruns, scope: str, way: Rerun, at_least: int) -> Rerun | None:
        """`way` with the fewest blocks run again, `at_least` or more, that fits by both counts; None where that is not
        faster than `ways`.

        More blocks run again hold less, except for the last one: it runs again when everything behind the blocks is
        still there, so it is tried by itself. The two counts are close, so the search goes up from `at_least` in
        doubling steps, then bisects.
        """

        def fits(count: int) -> bool:
            return self.fits({**ways, scope: replace(way, count=count)})

        last, faster = self._blocks(scope), self._faster(ways, scope, way, at_least)
        before = [n for n in faster if n < last]
        few, enough, step = -1, 0, 1
        while enough < len(before) and not fits(before[enough]):
            few, enough, step = (
                enough,
                min(enough + step, len(before) - 1) if enough < len(before) - 1 else len(before),
                2 * step,
            )
        if enough >= len(before):
            return replace(way, count=last) if last in faster and fits(last) else None
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if fits(before[middle]) else (middle, enough)
        return replace(way, count=before[enough])

    def _sure(self, ways: Reruns, scope: str, among: Sequence[Rerun]) -> Iterator[tuple[float, tuple[int, int], Rerun]]:
        """Of ways in which the other blocks keep `rest`: the seconds that are sure by the walk, the fewest blocks by
        the Problem's count and the number of blocks with these seconds, and the way.

        The peak is the greatest of sums that each grow evenly with the number of blocks, so it is at most the line
        between its ends, where all blocks are alike.
        """
        last, room_bytes = self._blocks(scope), self.planner.request.limit_bytes
        for way in (way for way in among if not self.late()):
            if (at_least := self._counted(ways, scope, way)) is None or not self._faster(ways, scope, way, at_least):
                continue
            less, more = (self._peak_of_all(ways, scope, kept) for kept in (way.kept, way.rest))
            if less <= room_bytes < more:
                at_most = max(at_least, math.ceil(last * (more - room_bytes) / (more - less)))
                yield self.cost({**ways, scope: replace(way, count=at_most)}).time_s, (at_least, at_most), way

    def _fewest_of_two(self, ways: Reruns, scope: str, way: Rerun, at_least: int, at_most: int) -> Rerun | None:
        """`way` with the fewest blocks, from `at_least` to `at_most`, that keep `way.kept`, so that it fits by
        both counts; None where that is not faster than `ways`, or all blocks keep the same."""
        both = range(1, min(at_most, self._blocks(scope) - 1) + 1)
        faster = [n for n in self._faster(ways, scope, way, at_least) if n in both]
        found = bisect_left(faster, True, key=lambda n: self.fits({**ways, scope: replace(way, count=n)}))
        return replace(way, count=faster[found]) if found < len(faster) else None

    def _faster(self, ways: Reruns, scope: str, way: Rerun, at_least: int) -> list[int]:
        """The numbers of blocks, `at_least` or more, with which `way` is faster than `ways`."""
        below_s, counts = self.cost(ways).time_s * (1 - BETTER), range(at_least, self._blocks(scope) + 1)
        return [n for n in counts if self.cost({**ways, scope: replace(way, count=n)}).time_s < below_s]

    def _peak_of_all(self, ways: Reruns, scope: str, kept: tuple[str, ...] | None) -> float:
        """The peak where all blocks of a run are run again and keep `kept`; found once."""
        assert kept is not None
        key = (tuple((other, way) for other, way in ways.items() if other != scope), kept)
        if key not in self._peaks:
            self._peaks[key] = self._walked({**ways, scope: Rerun(kept, self._blocks(scope))}).peak
        return self._peaks[key]


def _sum(found: Cost, share: float, after: Cost, before: Cost) -> Cost:
    """`found`, and a share of the difference between two."""
    return Cost(
        **{
            part.name: getattr(found, part.name) + share * (getattr(after, part.name) - getattr(before, part.name))
            for part in fields(Cost)
        }
    )
