"""The walk through a space: from one start per number of places to ever better neighbours, as long as time and bounds allow.

    visit(shape)   solve what a place does, cut the model, time it under every timetable of the space
    walk           visit the starts and the same with fewer microbatches (all shapes, where they are few), then always the neighbours of
                   the best shape whose neighbours were not visited
    polish         solve the best shape to the end, and walk its memory; the next best where that makes another one the best

Nothing is visited whose floor (no work sent, no time waited but what the timetable makes everyone wait) is above what is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from autopar.errors import InfeasibleError, PlanError
from autopar.joint.inner import Inner, Models
from autopar.joint.laid import Found, lay
from autopar.joint.shapes import Shape, neighbours, starts
from autopar.joint.spaces import Space, Used
from autopar.joint.timetables import Timetable, timetable
from autopar.pipeline.schedules import SCHEDULES
from autopar.planner import FULL
from autopar.problem.remat import LEVELS

CLOSE = 0.01  # relative: prices are less exact than this


@dataclass(eq=False)
class Explorer:
    """One walk. `known_s` is the step that others have; `found` what every visited shape came to, None where it does not fit."""

    inner: Inner
    space: Space
    known_s: float
    deadline: float
    found: dict[Shape, Found | None] = field(default_factory=dict)
    floors: dict[Shape, float] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    expanded: set[Shape] = field(default_factory=set)
    polished: dict[Shape, None] = field(default_factory=dict)

    @property
    def best(self) -> Found | None:
        """Of those that are as fast as the fastest, as far as prices tell, the one that is easiest to live with: fewest places, then
        fewest stages, then fewest microbatches."""
        fit = [f for f in self.found.values() if f is not None]
        fastest_s = min((f.step_s for f in fit), default=0.0)
        near = [f for f in fit if f.step_s <= fastest_s * (1 + CLOSE)]
        return min(near, key=lambda f: (f.table.places, f.table.stages, f.table.microbatches, f.step_s), default=None)

    def run(self) -> Found | None:
        """The fastest plan of the space that is faster than `known_s`, or the fastest at all where nothing is known."""
        shapes = self.space.shapes(self.inner)
        self.floors = {shape: self._floor_s(shape) for shape in shapes}
        begin = shapes if len(shapes) <= FEW else starts(shapes, self.inner.request.cluster.levels[-1].size, self.inner.batch)
        for shape in sorted(begin, key=self.floors.__getitem__):
            self._slide(shape, shapes)
        while (at := self._promising()) is not None:
            self.expanded.add(at)
            for shape in neighbours(at, shapes):
                self.visit(shape)
        while (best := self.best) is not None and best.shape not in self.polished:
            self._polish(best)
        return best

    def _promising(self) -> Shape | None:
        """The best shape whose neighbours were not visited, while it is near the best of all and there is time. Where nothing fits
        yet, any shape that was visited."""
        if self._late():
            return None
        fit = {shape: f.step_s for shape, f in self.found.items() if f is not None}
        known = min(self.known_s, *fit.values(), math.inf) if fit else math.inf
        open_ = {shape: s for shape, s in fit.items() if shape not in self.expanded and s <= known * (NEAR if len(self.floors) <= MANY else NEARER)}
        if open_:
            return min(open_, key=lambda shape: (open_[shape], shape))
        if fit:
            return None
        rest = [shape for shape in self.found if shape not in self.expanded]
        return min(rest, key=lambda shape: (self.floors[shape], shape), default=None)

    def _slide(self, shape: Shape, shapes: list[Shape]) -> None:
        """Visit `shape`, and the same with fewer and fewer microbatches while that gets better."""
        before_s = math.inf
        while True:
            self.visit(shape)
            here = self.found.get(shape)
            fewer = [s for s in shapes if s.key == shape.key and s.microbatches < shape.microbatches]
            if here is None or here.step_s >= before_s or not fewer:
                return
            before_s, shape = here.step_s, fewer[-1]

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def visit(self, shape: Shape) -> None:
        """Price one shape, once, if it can be better than what is known."""
        known = min([self.known_s, *(f.step_s for f in self.found.values() if f is not None)])
        if shape in self.found or self._late() or self.floors[shape] > known * (1 - CLOSE):
            return
        self.inner.request.say(f"{self.space.name}: {shape}")
        self.found[shape] = None
        try:
            models = self.inner.models(shape, self._used(shape))
            self.found[shape] = self._at_levels(shape, models, self._tables(shape))
        except InfeasibleError as error:
            self.why.append(f"{shape}: {error}")

    def _at_levels(self, shape: Shape, models: Models, tables: list[Timetable]) -> Found:
        """The best with nothing run again, or with as many blocks run again as memory wants. Raises InfeasibleError where none fits."""
        best: Found | None = None
        failed = InfeasibleError("")
        for level in self._levels():
            if best is not None and best.memory_bytes < FULL * self.inner.limit_bytes:
                break  # not short of memory
            if self.inner.held_bytes(shape, level) > self.inner.limit_bytes:
                failed = InfeasibleError(f"cut evenly it holds {self.inner.held_bytes(shape, level) / 2**30:.2f} GiB per device, "
                                         f"{self.inner.limit_bytes / 2**30:.2f} GiB are there")
                continue
            try:
                found = self._price(shape, models, tables, level, exact=False)
            except InfeasibleError as error:
                failed = error
                continue
            best = found if best is None or found.step_s < best.step_s else best
        if best is None:
            raise failed
        return best

    def _levels(self) -> tuple[str, ...]:
        """The levels at which blocks may be run again."""
        request = self.inner.request
        return LEVELS if request.remat == "auto" and self.inner.whole.program.runs else (request.remat_level,)

    def _price(self, shape: Shape, models: Models, tables: list[Timetable], level: str, *, exact: bool) -> Found:
        """The best of all timetables, with choices made for the one that keeps least. Raises InfeasibleError where none fits."""
        if not tables:
            raise InfeasibleError(f"no schedule runs {shape.microbatches} microbatches on {shape.places} places")
        chosen = self.inner.solve(models, min(tables, key=lambda t: (t.kept, t.length)), level, exact=exact, apart=shape.places > 1)
        best: Found | None = None
        failed = InfeasibleError("")
        for table in sorted(tables, key=lambda t: t.length):
            try:
                found = lay(self.inner, self.space.name, shape, table, chosen, whole=exact)
            except InfeasibleError as error:
                failed = error
                continue
            best = found if best is None or found.step_s < best.step_s else best
        if best is None:
            raise failed
        return best

    def _polish(self, found: Found) -> None:
        """Solve a shape to the end, and lay it out as it runs; one that does not fit then is none."""
        shape = found.shape
        self.polished[shape], self.found[shape] = None, None
        models = self.inner.models(shape, self._used(shape))
        others = [table for table in self._tables(shape) if table != found.table]
        for tables, level in [([found.table], found.level), *((others, level) for level in dict.fromkeys((found.level, *self._levels())))]:
            with suppress(InfeasibleError):
                self.found[shape] = self._price(shape, models, tables, level, exact=True)
                return

    def _used(self, shape: Shape) -> Used:
        used = self.space.roles_on(shape.mesh)
        assert used is not None, "shapes of a space have meshes that the space can be on"
        return used

    def _tables(self, shape: Shape) -> list[Timetable]:
        """The timetables of the space that can run `shape`; of several that are the same on it one."""
        found: dict[tuple[float, float], Timetable] = {}
        for table in self._all_tables(shape):
            found.setdefault((round(table.length, 9), table.kept), table)
        return [t for t in found.values() if not any(o.length <= t.length and o.kept < t.kept for o in found.values())]

    def _all_tables(self, shape: Shape) -> Iterator[Timetable]:
        for kind in self.space.kinds:
            if shape.places == 1 and (kind.virtual > 1 or SCHEDULES[kind.schedule].splits_backward):
                continue
            if shape.places * kind.virtual > self.inner.pieces:
                continue
            table = timetable(kind, shape.places, shape.microbatches)
            with suppress(PlanError):
                if table.flying:  # raises where the schedule cannot
                    yield table

    def _floor_s(self, shape: Shape) -> float:
        """Nothing on `shape` is faster: its share of the least work there is, and the shortest wait for the first microbatch."""
        work_s = self.inner.work.step_s(self.inner.request.cluster.devices, shape.places, shape.microbatches)
        return work_s * _least_wait(shape.places, shape.microbatches, [kind.schedule for kind in self.space.kinds])


NEAR, NEARER = 1.2, 1.05  # neighbours of what is this close to the best are visited; of many shapes, only of the nearer
MANY = 100
FEW = 32  # so many shapes are all visited


def _least_wait(places: int, microbatches: int, schedules: list[str]) -> float:
    """The length of a step over its work: what no schedule of the space can avoid.

    A place cannot begin before the first microbatch has come through those before it: for the schedules with one stage per place
    and whole backwards, (m + p - 1) / m where stages are even, and no cut is better than the even one. The others wait at least
    for one stage's forward.
    """
    if all(SCHEDULES[name].virtual == 1 for name in schedules):
        return 1 + (places - 1) / microbatches / 2  # only places before a place are sure to hold it up: half of all on average
    return 1.0
