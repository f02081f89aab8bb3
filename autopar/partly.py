"""How much of its blocks a plan of one stage and one microbatch runs again: what they keep, and how many of them, no more than memory wants.

A level says what all blocks keep that are run again, and runs all of them again. Between that and nothing there are, for every corner of seconds against bytes under the choices of an
answer (problem.frontier), the first n of the N blocks of a run (`Stage.again`): they take n/N of the seconds that running all of them again takes, and of the bytes that it saves. What fits
does so by both counts: that of the Problem, of which this is a mixture, and the walk over the program as it runs.

Choices for it are made by what bytes are worth: with no limit, each byte costs what running all blocks again takes for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial

from autopar.pipeline.alone import step_cost
from autopar.planner import Candidate, Planner
from autopar.problem.build import Model
from autopar.problem.keeping import choices
from autopar.problem.remat import rematerialised
from autopar.problem.shares import ForwardPrices
from autopar.problem.types import Cost, Solution
from autopar.recipes.free import space
from autopar.search import ilp

BETTER = 1e-9
"""Relative: what is less is the rounding of sums."""

DEARER = (1.0, 4.0, 16.0)
"""Times what running blocks again takes for a byte: where memory is so short that this is not enough choices with less bytes are made."""


@dataclass(frozen=True)
class Way:
    """What the blocks of a run keep that are run again, and how many of them are: the first ones."""

    kept: tuple[str, ...]
    count: int


Ways = Mapping[str, Way]
"""By scope of blocks."""


def filled(planner: Planner, found: Candidate, below_s: float = math.inf) -> Candidate:
    """`found`, or the same choices with as few of its blocks run again, and with as much kept of them, as makes them fastest within memory, where that is faster. That is
    not looked for where blocks are to be run again at a level that was asked for, and where nothing of it may take less than `below_s`."""
    if not found.remat or planner.request.remat != "auto":
        return found
    filling = _Filling(planner, found)
    if filling.plain_s >= below_s or (ways := filling.fastest()) == filling.all:
        return found
    return filling.made(ways)


def by_bytes(planner: Planner, sizes: tuple[int, ...], below_s: float, time_limit_s: float) -> Candidate | None:
    """The answer of the free search on a mesh with no limit of memory, but a price of bytes: what running all blocks again takes for each, as `planner` has them, and more where what comes of that
    does not fit; `filled` then. None where nothing fits, or takes less than `below_s`. Each Problem may take `time_limit_s`."""
    level = planner.model(sizes, space(sizes), "search")
    again, roomy = level.with_limit(math.inf).problem, level.plainly.with_limit(math.inf).problem.barred(level.problem)
    first = ilp.glance(roomy, time_limit_s=time_limit_s, cutoff_s=below_s)
    less, more = roomy.price(first.choice), again.price(first.choice)
    if first.bound_s >= below_s or more.memory_bytes >= less.memory_bytes:
        return None
    byte_s = max(0.0, more.time_s - less.time_s) / (less.memory_bytes - more.memory_bytes)
    for dear in DEARER:
        filling = _Filling(planner, _whole(planner, level, ilp.glance(roomy.paid(dear * byte_s), time_limit_s=time_limit_s).choice))
        if filling.plain_s >= below_s:
            return None
        if filling.fits(ways := filling.fastest()):
            return filling.made(ways)
    return None


def _whole(planner: Planner, level: Model, choice: tuple[int, ...]) -> Candidate:
    """The Candidate with these choices in which all blocks are run again whole, whether it fits or not."""
    mesh, remat = level.prices.mesh, planner.levels("full")
    timed = partial(step_cost, forward=planner.forward(mesh))
    model = rematerialised(level.plainly, planner.forward(mesh), remat)
    return Candidate("search", mesh, model.with_limit(planner.request.limit_bytes), Solution(choice, "ilp"), timed(model.with_limit(math.inf), choice), remat=remat, timed=timed)


@dataclass(eq=False)
class _Filling:
    """The ways to run the blocks of a Candidate again under its choices."""

    planner: Planner
    found: Candidate
    _costs: dict[tuple[tuple[str, tuple[str, ...]], ...], Cost] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Model:
        """Its Problem with nothing run again, and no limit."""
        return self.found.model.plainly.with_limit(math.inf)

    @cached_property
    def forward(self) -> ForwardPrices:
        """Prices of the forward on its mesh."""
        return self.planner.forward(self.found.mesh)

    @property
    def plain_s(self) -> float:
        """Seconds of a step in which nothing is run again, which no way takes less than."""
        return self._cost({}).time_s

    @property
    def all(self) -> Ways:
        """All blocks, as the Candidate has them."""
        return {scope: Way(tuple(kept), self._blocks(scope)) for scope, kept in self.found.remat.items()}

    def fastest(self) -> Ways:
        """Run by run, the first of which has all the room that there is; all of them where nothing that fits is faster, and these may not fit. What is fastest by its count alone is walked first,
        as long as it is faster than what fits by then."""
        best = dict(self.all)
        for scope in best:
            corners = choices(self.plain, self.forward, self.found.solution.choice, scope).corners
            least = [(self.cost({**best, scope: Way(corner.kept, count)}).time_s, number, count) for number, corner in enumerate(corners) if (count := self._counted(best, scope, corner.kept)) is not None]
            for hoped_s, number, at_least in sorted(least):
                if hoped_s >= self.cost(best).time_s * (1 - BETTER) and self.fits(best):
                    break
                count = self._fewest(best, scope, corners[number].kept, at_least)
                if count is not None:
                    best[scope] = Way(corners[number].kept, count)
        return best

    def made(self, ways: Ways) -> Candidate:
        """The Candidate that runs its blocks again so."""
        walked = self._walked(ways)
        model = rematerialised(self.plain, self.forward, walked.remat).with_limit(self.found.model.problem.memory_limit_bytes)
        return replace(walked, model=model, solution=replace(self.found.solution, bound_s=0.0, optimal=False), cost=self.cost(ways))

    def fits(self, ways: Ways) -> bool:
        """Whether a device has room for it, by both counts."""
        limit_bytes = self.planner.request.limit_bytes
        return self.cost(ways).memory_bytes <= limit_bytes and self._walked(ways).peak <= limit_bytes

    def _walked(self, ways: Ways) -> Candidate:
        """The Candidate with its blocks run again so, and its peak, but for what that costs."""
        remat = {scope: way.kept for scope, way in ways.items() if way.count}
        again = {scope: ways[scope].count for scope in remat if ways[scope].count < self._blocks(scope)}
        return self.planner.counted(replace(self.found, remat=remat, again=again))

    def cost(self, ways: Ways) -> Cost:
        """What a step costs: of each run as much of the way from no block run again to all of them as it has of them."""
        remat: dict[str, tuple[str, ...]] = {}
        found = before = self._cost(remat)
        for scope, way in ways.items():
            remat = {**remat, scope: way.kept}
            after = self._cost(remat)
            share = way.count / self._blocks(scope)
            found = Cost(**{part.name: getattr(found, part.name) + share * (getattr(after, part.name) - getattr(before, part.name)) for part in fields(Cost)})
            before = after
        return found

    def _cost(self, remat: Mapping[str, tuple[str, ...]]) -> Cost:
        """What a step costs in which all blocks of these runs are run again, and no others."""
        key = tuple(remat.items())
        if key not in self._costs:
            self._costs[key] = step_cost(rematerialised(self.plain, self.forward, remat), self.found.solution.choice, self.forward)
        return self._costs[key]

    def _blocks(self, scope: str) -> int:
        return self.planner.program.runs[scope].count

    def _counted(self, ways: Ways, scope: str, kept: tuple[str, ...]) -> int | None:
        """How many blocks of a run must be run again at least, where they keep that, by the count of the Problem alone; None where not even all of them are enough."""
        limit_bytes, last = self.planner.request.limit_bytes, self._blocks(scope)
        found = bisect_left(range(last + 1), True, key=lambda count: self.cost({**ways, scope: Way(kept, count)}).memory_bytes <= limit_bytes)
        return found if found <= last else None

    def _fewest(self, ways: Ways, scope: str, kept: tuple[str, ...], at_least: int) -> int | None:
        """How many blocks of a run must be run again `at_least` or more where they keep that, with all others as they are; None where that is no faster. The more there are the less is held, but for the
        last one, which is run again when all that is behind the blocks is there. The two counts are near each other: steps from `at_least` on double until there is room."""
        def fits(count: int) -> bool:
            return self.fits({**ways, scope: Way(kept, count)})

        below_s, last = self.cost(ways).time_s * (1 - BETTER), self._blocks(scope)
        faster = [n for n in range(at_least, last + 1) if self.cost({**ways, scope: Way(kept, n)}).time_s < below_s]
        before = [n for n in faster if n < last]
        few, enough, step = -1, 0, 1
        while enough < len(before) and not fits(before[enough]):
            few, enough, step = enough, min(enough + step, len(before) - 1) if enough < len(before) - 1 else len(before), 2 * step
        if enough >= len(before):
            return last if last in faster and fits(last) else None
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if fits(before[middle]) else (middle, enough)
        return before[enough]
