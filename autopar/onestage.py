"""Plans of one stage and one microbatch: price every recipe, search every mesh, keep the best. Called by joint.choice
and joint.offloading.

    read the graph -> options per axis size -> clusters -> for each mesh a Problem -> recipes and search -> Plan

Where memory is short, all this is done at each level of rematerialisation (problem.remat.LEVELS) that may help.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.asked_search import check_mesh, check_search, looks, run_search, searched_meshes
from autopar.bare_plan import laid
from autopar.bestfirst import ALONE, GLANCE_S, MOST_HONED, PRICE_TOLERANCE, Elsewhere, Look, first_look, nowhere
from autopar.candidate import Candidate
from autopar.decisions import rule_notes, tiling_notes
from autopar.errors import InfeasibleError
from autopar.memory import predict
from autopar.named_strategies import FULL, best_named
from autopar.partial_remat import by_bytes, filled
from autopar.pipeline.single_stage import step_cost
from autopar.plan import Alternative, Plan, Predicted
from autopar.planner import Planner
from autopar.problem.largest import largest
from autopar.problem.remat import Levels, price
from autopar.recipes.free import space
from autopar.recipes.names import with_level
from autopar.request import Request
from autopar.search import ilp
from autopar.text import gibibytes, seconds, times
from autopar.timer import Timer


def plan(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """Plan one captured graph. `about` fills the Plan's fields model, graph_hash, source and notes.

    Raises InfeasibleError when no plan fits device memory, PlanError for unknown recipes, searches or meshes.
    """
    return plan_with(Planner.of(gm, hints, request), **about)


def plan_with(planner: Planner, elsewhere: Elsewhere | None = None, timer: Timer | None = None, **about: Any) -> Plan:
    """As `plan`, with the graph that `planner` has read and the prices that it has cached.

    `elsewhere` are the pipelines that these plans compete with, if there are any. Without a `timer` the time limit is
    the request's.
    """
    timer = timer or Timer(planner.request.time_limit_s)
    check_mesh(planner.request)
    check_search(planner)
    levels = _Levels(planner, elsewhere or nowhere(), timer)
    levels.search()
    best, tried = levels.answer, [*levels.full, *(row for level in levels.looked for row in level.tried or ())]
    if best is None or best.found is None:
        raise InfeasibleError(_shortfall(planner, tried), missing_bytes=min(planner.missing_bytes, default=None))
    about = {**about, "notes": (*about.get("notes", ()), *best.notes)}
    free = planner.request.remat == "auto"
    proven_s = (
        min(level.bound_s for level in levels.looked) if levels.closed and not (free and best.found.remat) else 0.0
    )
    # a bound holds for plans of one level: where results may be kept otherwise, or only some of the blocks run again,
    # nothing is proven
    made = finish(planner, best.found, proven_s, tried, about)
    return replace(made, notes=timer.noted(made.notes))


@dataclass(eq=False)
class _Level:
    """The plans at one level of rematerialisation.

    `recipe` is the best named strategy, `tried` has a row for each; `look` is the state of the free search; `partly`
    the best plan that runs only some blocks again. After `finish`, `found` is the best of all, with `notes` for the
    plan and a bound in seconds (`bound_s`).
    """

    name: str
    planner: Planner
    timer: Timer
    elsewhere: Elsewhere
    remat: Levels
    recipe: Candidate | None = None
    tried: list[Alternative] | None = None
    look: Look | None = None
    partly: Candidate | None = None
    found: Candidate | None = None
    notes: tuple[str, ...] = ()
    bound_s: float = 0.0

    @property
    def fastest(self) -> Candidate | None:
        """The fastest Candidate so far that fits."""
        each = (self.found, self.recipe, self.partly, self.look.best if self.look is not None else None)
        return min((one for one in each if one is not None), key=lambda one: one.cost.time_s, default=None)

    @property
    def fastest_s(self) -> float:
        """The step time of `fastest`; infinite where there is none."""
        return _seconds(self.fastest)

    def begin(self, alone_s: float) -> None:
        """Glance at all meshes, given the fastest known step of one stage, `alone_s`. Where none is known yet, the
        recipes are priced first."""
        if math.isinf(alone_s) or not looks(self.planner.request):
            self.name_recipes(alone_s)
        if looks(self.planner.request):
            self.look = first_look(
                self.planner, searched_meshes(self.planner), self.timer, min(alone_s, self.fastest_s), self.elsewhere
            )
            if self.remat and self.planner.request.remat == "auto":
                self.run_partly_again(alone_s)

    def run_partly_again(self, alone_s: float) -> None:
        """Search the best meshes for plans that run only as many blocks again as memory requires, with choices made for
        that (partial_remat.by_bytes).

        Takes no more than half of the whole time limit, unless no plan that fits is known yet. If then no mesh has a
        glance either, it goes through all of them.
        """
        seen = sorted(self.look.seen, key=lambda first: first.cost.time_s) if self.look is not None else []
        for sizes in [first.mesh.sizes for first in seen[:MOST_HONED]] or (
            searched_meshes(self.planner) if math.isinf(alone_s) else []
        ):
            below_s = min(alone_s, self.fastest_s, self.elsewhere.seconds)
            if below_s < math.inf and self.timer.skips(self.timer.ends_at - self.timer.limit_s / 2):
                return
            self.planner.request.say(f"bytes for seconds on {times(sizes)}")
            with suppress(InfeasibleError):
                self.partly = by_bytes(self.planner, sizes, below_s, GLANCE_S, self.timer.skips) or self.partly

    def name_recipes(self, alone_s: float) -> None:
        """Price the recipes."""
        known_s = min(alone_s, self.fastest_s)
        self.recipe, tried = best_named(self.planner, self.timer, known_s, self.elsewhere.asked)
        self.tried = (
            tried
            if self.name == self.planner.request.remat_level
            else [replace(one, name=with_level(one.name, self.name)) for one in tried]
        )

    def finish(self, alone_s: float, until: float) -> None:
        """Complete the recipes and the search, and set `found`, `notes` and `bound_s`. `alone_s` is the fastest known
        step of one stage; where pipelines are yet to be searched, nothing is begun after `until` (time.monotonic)."""
        planner, request = self.planner, self.planner.request
        planner.remat, found = self.remat, None
        if self.tried is None:
            self.name_recipes(alone_s)
        if self.look is not None:
            found, self.bound_s = self.look.finished(min(alone_s, self.fastest_s), until)
        elif request.recipe is None:
            found, self.bound_s = run_search(planner, self.timer)
            found = filled(planner, found, late=self.timer.grace()) if found is not None else None
        found = min(
            (one for one in (found, self.partly) if one is not None), key=lambda one: one.cost.time_s, default=None
        )
        self.found, self.notes = _simplest(found, self.recipe)


@dataclass(eq=False)
class _Levels:
    """The levels of rematerialisation, tried in order while they promise something: those that were `looked` at, and a
    row in `full` for each at which nothing fits.

    While devices are short of memory, the next level is glanced at before anything is solved, so that there is a good
    answer early. Then the levels are finished, the most promising first.
    """

    planner: Planner
    elsewhere: Elsewhere
    timer: Timer
    looked: list[_Level] = field(default_factory=list)
    full: list[Alternative] = field(default_factory=list)
    # whether devices turned out not to be short of memory, so that more rematerialisation gains nothing
    roomy: bool = False

    @property
    def closed(self) -> bool:
        """Whether the bounds of the levels that were looked at hold for all plans: no other level can be better."""
        return self.roomy or len(self.planner.open_levels) == 1

    def search(self) -> None:
        """Go through the levels until the rest promises nothing, or time is up."""
        begun: list[_Level] = []
        for name in self.planner.open_levels:
            if self._enough(name):
                self._finish(begun)
                if not begun or self._enough(name):
                    return
                begun = []
            for _ in _fitting(self.planner, [name], self.full):
                level = _Level(name, self.planner, self.timer, self.elsewhere, self.planner.remat)
                level.begin(self.fastest_s)
                self.looked.append(level)
                begun.append(level)
        self._finish(begun)

    def _finish(self, begun: Sequence[_Level]) -> None:
        """Finish the levels in `begun`, the most promising first."""
        until = self.timer.after(ALONE)
        for level in sorted(begun, key=lambda level: level.fastest_s):
            level.finish(self.fastest_s, until)

    @property
    def fastest(self) -> Candidate | None:
        """The fastest Candidate so far that fits, of all levels."""
        return min(
            (level.fastest for level in self.looked if level.fastest is not None),
            key=lambda one: one.cost.time_s,
            default=None,
        )

    @property
    def fastest_s(self) -> float:
        """The step time of `fastest`; infinite where there is none."""
        return _seconds(self.fastest)

    @property
    def answer(self) -> _Level | None:
        """The level with the fastest plan; of levels that differ by less than SIMPLER, the first."""
        best: _Level | None = None
        for level in self.looked:
            if _seconds(level.found) < (_seconds(best.found) * (1 - SIMPLER) if best is not None else math.inf):
                best = level
        return best

    def _enough(self, name: str) -> bool:
        """Whether a level promises no faster plan than is known, or there is no time for it."""
        best = self.fastest
        if best is None:
            return False
        if not _short_of_memory(self.planner, best) and not self._others_are_short(best):
            self.roomy = True
            return True
        least_s = self.planner.work(name).step_s(self.planner.request.cluster.devices, 1, 1)
        return least_s >= min(self.fastest_s, self.elsewhere.seconds) * (1 - SIMPLER) or self.timer.skips()

    def _others_are_short(self, best: Candidate) -> bool:
        """Whether some mesh would have a faster plan than `best` if devices had more memory, where something failed for
        want of it."""
        below_s = best.cost.time_s * (1 - 2 * PRICE_TOLERANCE)
        return bool(self.planner.missing_bytes) and faster_with_room(self.planner, below_s)


def _seconds(found: Candidate | None) -> float:
    """The step time of a Candidate; infinite for None."""
    return found.cost.time_s if found is not None else math.inf


def beating(planner: Planner, known_s: float, open_: Sequence[str], timer: Timer, **about: Any) -> Plan:
    """A plan of the free search that is faster than `known_s`, at the first of the levels `open_` that has one. Raises
    InfeasibleError where none that fits is faster."""
    for level in _fitting(planner, open_, []):
        short = len(planner.missing_bytes)
        found, bound_s = first_look(planner, searched_meshes(planner), timer, known_s, nowhere()).finished(known_s)
        if found is not None and found.cost.time_s < known_s * (1 - PRICE_TOLERANCE):
            return finish(planner, found, bound_s if level == "none" else 0.0, [], about)
        if len(planner.missing_bytes) == short:
            break  # nothing failed for want of memory, so that more rematerialisation would not help
    raise InfeasibleError(f"no plan that fits is faster than {seconds(known_s)}")


def faster_with_room(planner: Planner, below_s: float) -> bool:
    """Whether a glance at all meshes finds a plan that takes less than `below_s` if memory is not limited and no block
    runs again. The memory limit of `planner` does not count. Where nothing was found once, nothing is looked for that
    takes less."""
    held = planner.request.settings.offload
    if below_s <= planner.roomy_s.get(held, 0.0):
        return False
    roomy = planner.anew(replace(planner.request, memory_bytes=math.inf))
    for sizes in searched_meshes(roomy):
        model = roomy.model(sizes, space(sizes), "with room")
        found = ilp.glance(model.problem, time_limit_s=GLANCE_S, cutoff_s=below_s)
        if step_cost(model, found.choice, roomy.forward(model.prices.mesh)).time_s < below_s:
            return True
    planner.roomy_s[held] = below_s
    return False


def _fitting(planner: Planner, among: Sequence[str], tried: list[Alternative]) -> Iterator[str]:
    """The levels of `among` at which something may fit; `planner` prices at a level while it is the current one. The
    others get a row in `tried`. A level that the user asked for is always tried: its plans say how much memory each
    lacks."""
    request = planner.request
    for level in among:
        planner.remat = planner.levels(level)
        if len(planner.open_levels) > 1 and (over := planner.least_bytes() - request.limit_bytes) > 0:
            planner.missing_bytes.append(over)
            tried.append(
                Alternative(
                    f"{'no' if level == 'none' else level} remat",
                    (request.cluster.devices,),
                    None,
                    None,
                    f"cut evenly over all devices it is {gibibytes(over)} per device over the limit",
                )
            )
            continue
        yield level


def _short_of_memory(planner: Planner, best: Candidate) -> bool:
    """Whether the best plan's mesh would have a faster plan (by more than prices tell apart) if devices had more
    memory.

    Decided by the Problem of the free search on that mesh, also where `best` is a recipe that competes with the search.
    Its fastest solution without a limit is walked too: it may fit by what the Problem counts, and not as it runs.
    """
    problem = best.model.problem
    room_bytes = FULL * problem.memory_limit_bytes  # may be less than the device has, to leave room for temporaries
    if not planner.missing_bytes and best.cost.memory_bytes < room_bytes:
        return False
    free = best.model
    if best.name != "search" and planner.request.recipe is None:
        planner.remat = best.remat
        free = planner.model(best.mesh.sizes, space(best.mesh.sizes), "with room")
    roomy = free.with_limit(math.inf)
    there = replace(best, model=roomy, solution=ilp.glance(roomy.problem, time_limit_s=GLANCE_S))
    if there.counted_bytes < room_bytes and planner.counted(there).peak <= planner.request.limit_bytes:
        return False  # `best` may be slower by its Problem, but not for want of memory
    return roomy.problem.price(there.solution.choice).time_s < problem.price(best.solution.choice).time_s * (
        1 - 2 * PRICE_TOLERANCE
    )


SIMPLER = 0.005
"""Relative: a recipe that is slower than the search's answer by less than this is chosen. The difference is below the
error of the prices, and a recipe is easier to understand."""


def _simplest(found: Candidate | None, recipe: Candidate | None) -> tuple[Candidate | None, tuple[str, ...]]:
    """The search's answer, or the best recipe where that is as fast within `SIMPLER`; then a note says both times."""
    if found is None or recipe is None:
        return found or recipe, ()
    searched_s, named_s = found.cost.time_s, recipe.cost.time_s
    if named_s > searched_s * (1 + SIMPLER):
        return found, ()
    if searched_s >= named_s:
        return recipe, ()
    return recipe, (
        f"{recipe.name} ({seconds(named_s)}) rather than what the search found ({seconds(searched_s)}): "
        f"prices do not tell {100 * (named_s / searched_s - 1):.2f} % apart",
    )


def _shortfall(planner: Planner, tried: Sequence[Alternative]) -> str:
    """The text of the error where nothing fits: which recipes and meshes were tried, what they lack, and the largest
    tensors."""
    lines = [f"no plan fits {planner.request.cluster.describe()}:"]
    lines += [f"  {a.name} on {times(a.mesh)}: {a.why}" for a in tried]
    if planner.missing_bytes:
        lines.append(f"the plan of least memory is {gibibytes(min(planner.missing_bytes))} per device over the limit")
    lines.append("the five largest tensors: " + "; ".join(largest(planner.program)))
    trained = planner.request.settings.training
    smaller = ", a smaller batch, or an optimizer with less state" if trained else " or a smaller batch"
    lines.append(f"use more or larger devices{smaller}")
    return "\n".join(lines)


def finish(
    planner: Planner, best: Candidate, bound_s: float, tried: Sequence[Alternative], about: Mapping[str, Any]
) -> Plan:
    """The Plan of one priced answer. `bound_s` is a proven bound on the step (0: none), `tried` what else was priced,
    `about` the Plan's fields model, graph_hash, source and notes."""
    cost, made = best.cost, laid(planner, best)
    program = planner.parted(made.parted).program
    notes = (
        *([price(cost, best.plainly)] if best.remat else []),
        *tiling_notes(program, made),
        *rule_notes(planner.program, planner.request.rules),
    )
    about = {**about, "notes": (*about.get("notes", ()), *notes)}
    peak_bytes = predict(program, made).peak_bytes if best.peak_bytes is None else best.peak_bytes
    predicted = Predicted(
        cost.time_s, peak_bytes, cost.compute_s, cost.exposed_s, cost.hidden_s, min(bound_s, cost.time_s)
    )
    return replace(made, alternatives=tuple(tried), predicted=predicted, **about)
