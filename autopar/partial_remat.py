"""Partial rematerialisation of a plan of one stage and one microbatch: which results blocks keep, and how many blocks
are run again. Called by bestfirst and onestage.

A level (problem.remat.LEVELS) fixes what blocks keep and runs all of them again. In between, the first n of the N
blocks of a run can be run again (`Stage.again`), and what they keep can be any corner of the trade-off of seconds
against bytes (problem.remat_frontier). Running n blocks again is priced at n/N of the seconds that all N take, and
saves n/N of the bytes. A plan has to fit by two counts: that of the Problem, interpolated so, and the walk over the
program as it runs.

`filled` does this for given choices. `by_bytes` also makes the choices: it solves a Problem without a memory limit in
which every byte costs the seconds that running all blocks again would take to save it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
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
    """How one run of blocks is run again: the first `count` blocks are, and keep the results of the nodes `kept`."""

    kept: tuple[str, ...]
    count: int


Reruns = Mapping[str, Rerun]
"""The Rerun of each run of blocks, by scope."""


def filled(planner: Planner, found: Candidate, below_s: float = math.inf) -> Candidate:
    """`found`, or the same choices with fewer blocks run again or more results kept, as is fastest within memory.

    Nothing is looked for where the user asked for a level of rematerialisation, or where no way could take less than
    `below_s`.
    """
    if not found.remat or planner.request.remat != "auto":
        return found
    filling = _Filling(planner, found)
    if filling.plain_s >= below_s or (ways := filling.fastest()) == filling.all:
        return found
    return filling.made(ways)


def by_bytes(planner: Planner, sizes: tuple[int, ...], below_s: float, time_limit_s: float) -> Candidate | None:
    """The free search on a mesh with a price of bytes in place of a memory limit (see the module docstring), filled.

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
            planner, _whole(planner, level, ilp.glance(roomy.paid(dear * byte_s), time_limit_s=time_limit_s).choice)
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
    """The search for the fastest Reruns of the blocks of a Candidate; its choices of layouts stay."""

    planner: Planner
    found: Candidate
    _costs: dict[tuple[tuple[str, tuple[str, ...]], ...], Cost] = field(default_factory=dict)

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
        leave.

        For each corner of what a run may keep, the Problem's count gives the fewest blocks; corners are walked in order
        of the step time that this gives, while they promise to beat the best that fits. Where nothing fits and is
        faster it is `all`, which may not fit.
        """
        best = dict(self.all)
        for scope in best:
            corners = choices(self.plain, self.forward, self.found.solution.choice, scope).corners
            least = [
                (self.cost({**best, scope: Rerun(corner.kept, count)}).time_s, number, count)
                for number, corner in enumerate(corners)
                if (count := self._counted(best, scope, corner.kept)) is not None
            ]
            for hoped_s, number, at_least in sorted(least):
                if hoped_s >= self.cost(best).time_s * (1 - BETTER) and self.fits(best):
                    break
                count = self._fewest(best, scope, corners[number].kept, at_least)
                if count is not None:
                    best[scope] = Rerun(corners[number].kept, count)
        return best

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
        return self.planner.counted(replace(self.found, remat=remat, again=again))

    def cost(self, ways: Reruns) -> Cost:
        """The Cost of a step under `ways`: interpolated, for each run, between none and all of its blocks run again."""
        remat: dict[str, tuple[str, ...]] = {}
        found = before = self._cost(remat)
        for scope, way in ways.items():
            remat = {**remat, scope: way.kept}
            after = self._cost(remat)
            share = way.count / self._blocks(scope)
            found = Cost(
                **{
                    part.name: getattr(found, part.name)
                    + share * (getattr(after, part.name) - getattr(before, part.name))
                    for part in fields(Cost)
                }
            )
            before = after
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

    def _counted(self, ways: Reruns, scope: str, kept: tuple[str, ...]) -> int | None:
        """The fewest blocks of a run that have to be run again if these keep `kept`, by the Problem's count; None where
        not even all are enough."""
        limit_bytes, last = self.planner.request.limit_bytes, self._blocks(scope)
        found = bisect_left(
            range(last + 1),
            True,
            key=lambda count: self.cost({**ways, scope: Rerun(kept, count)}).memory_bytes <= limit_bytes,
        )
        return found if found <= last else None

    def _fewest(self, ways: Reruns, scope: str, kept: tuple[str, ...], at_least: int) -> int | None:
        """The fewest blocks of a run, `at_least` or more, with which `ways` fit by both counts if the blocks keep
        `kept`; None where that is not faster than `ways`.

        More blocks run again hold less, except for the last one: it runs again when everything behind the blocks is
        still there, so it is tried by itself. The two counts are close, so the search goes up from `at_least` in
        doubling steps, then bisects.
        """

        def fits(count: int) -> bool:
            return self.fits({**ways, scope: Rerun(kept, count)})

        below_s, last = self.cost(ways).time_s * (1 - BETTER), self._blocks(scope)
        faster = [n for n in range(at_least, last + 1) if self.cost({**ways, scope: Rerun(kept, n)}).time_s < below_s]
        before = [n for n in faster if n < last]
        few, enough, step = -1, 0, 1
        while enough < len(before) and not fits(before[enough]):
            few, enough, step = (
                enough,
                min(enough + step, len(before) - 1) if enough < len(before) - 1 else len(before),
                2 * step,
            )
        if enough >= len(before):
            return last if last in faster and fits(last) else None
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if fits(before[middle]) else (middle, enough)
        return before[enough]
