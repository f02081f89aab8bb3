"""The walk through a space of shapes: local search from one start per number of places, as long as time and bounds
allow. Called by joint.choice.

    visit(shape)   a glance: solve the Problem of one place quickly, cut the model into stages, and time them under
                   every timetable of the space
    walk           visit the starts, each also with fewer microbatches (or all shapes, if there are few). After each
                   start, visit the neighbours of the best shape not yet expanded, and go on with the first one that is
                   faster; after all starts, repeat that while it finds anything near the best. Starts are in order of
                   their floors; after SLOWER_STARTS of them in a row that got slower, the rest is left out
    polish         solve the best shape exactly and walk its memory; then shapes near it that may be faster. If another
                   shape becomes the best, walk on from that
    hone           try other numbers of stages for the result, and improve it by descent on the price of the whole step
                   (joint.stage_counts, joint.pipeline_honing)
    far            a second walk, once the result is refined (joint.choice): to neighbours further from the best, and
                   with gradients scattered after every microbatch

A shape is not visited if its floor is above the fastest known step: first the least work, with no waiting but what
every timetable has; before a visit what a quick look proves of all shapes that differ from it only in microbatches
(joint.prove). Nor is a shape solved exactly if its proven bound is above that step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.bestfirst import HONED, PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint import inside, walk_limits
from autopar.joint.pipeline_honing import honed
from autopar.joint.pricing import Pricing
from autopar.joint.prove import families, must_rerun
from autopar.joint.scattering import scattered
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import QuickLook, Shape, filled, like_parts, neighbours, starts
from autopar.joint.spaces import Space
from autopar.joint.stage_counts import with_other_stages
from autopar.joint.staging import Found
from autopar.joint.ways import Beaten, filled_with, simplest
from autopar.named_strategies import FULL
from autopar.text import seconds


@dataclass(eq=False)
class Explorer:
    """One walk, until `deadline` (time.monotonic).

    known_s      the fastest step that is known from elsewhere
    wider        proven bounds of shapes, from a walk through a space that contains this one
    reach        how far above the fastest step a glance looks at most, as a factor
    quick_s      a quick look at shapes (None: none is taken)
    floors       a lower bound in seconds for each shape of the space
    found        the result of each visited shape; None where it does not fit or is beaten
    beaten       of beaten shapes: the factor, and the fastest step at that time
    why          the reasons why shapes do not fit
    raised       the shapes whose floor is raised already
    took_s       seconds of each glance with a result
    expanded, polished, scattered, refined    shapes whose neighbours were visited; solved exactly; tried so; and honed
    far          whether what seldom gains is tried, too: scattering, neighbours of shapes above NEARER of the best
    """

    context: SearchContext
    space: Space
    known_s: float
    deadline: float
    wider: Mapping[Shape, float] = field(default_factory=dict)
    reach: float = math.inf
    quick_s: QuickLook | None = None
    found: dict[Shape, Found | None] = field(default_factory=dict)
    floors: dict[Shape, float] = field(default_factory=dict)
    raised: set[Shape] = field(default_factory=set)
    why: list[str] = field(default_factory=list)
    beaten: dict[Shape, tuple[float, float]] = field(default_factory=dict)
    took_s: dict[Shape, float] = field(default_factory=dict)
    expanded: set[Shape] = field(default_factory=set)
    polished: dict[Shape, None] = field(default_factory=dict)
    refined: set[Shape] = field(default_factory=set)
    scattered: set[Shape] = field(default_factory=set)
    far: bool = False
    hurried: bool = False  # whether time was up before all that was promising was visited

    @cached_property
    def pricing(self) -> Pricing:
        """What prices the shapes."""
        return Pricing(self.context, self.space)

    def again(self, known_s: float, deadline: float, wider: Mapping[Shape, float], reach: float) -> Explorer:
        """Another walk through the same space, which reuses all results of this one."""
        other = replace(self, known_s=known_s, deadline=deadline, wider=wider, reach=reach, hurried=False)
        other.pricing = self.pricing
        return other

    @property
    def fit(self) -> dict[Shape, Found]:
        """The results of visited shapes that fit, by shape."""
        return {shape: found for shape, found in self.found.items() if found is not None}

    @property
    def best(self) -> Found | None:
        """The simplest of the results that are about as fast as the fastest one (ways.simplest)."""
        return simplest([*self.fit.values()], self.known_s)

    @property
    def settled(self) -> list[Found]:
        """The results of shapes that were solved exactly."""
        return [found for shape, found in self.fit.items() if shape in self.polished]

    @property
    def proven(self) -> dict[Shape, float]:
        """For each shape of the space a proven lower bound in seconds."""
        return {shape: max(floor_s, self.pricing.proven.get(shape, 0.0)) for shape, floor_s in self.floors.items()}

    @property
    def least_floor_s(self) -> float:
        """A lower bound on all plans of the space in seconds: the least work, and the wait that no schedule avoids."""
        return min((self.pricing.floor_s(shape, self.pricing.levels[0]) for shape in self.floors), default=math.inf)

    @property
    def reason(self) -> str:
        """The text of an error: why the walk has no result."""
        if not self.floors:
            return self.space.none(self.context)
        if self.hurried:
            known = f"; none yet is faster than {seconds(self.known_s)}" if self.known_s < math.inf else ""
            return f"time was up before all of it was priced{known}"
        return self.why[0] if self.why and not self.beaten else f"no plan of it is faster than {seconds(self.known_s)}"

    @property
    def least_s(self) -> float:
        """The fastest known step, of this walk or elsewhere."""
        return min(self.known_s, self._fastest_s)

    def begin(self) -> None:
        """Visit the shape that is like a part of the cluster alone, before all else."""
        for shape in like_parts(self._shapes(), self.context.batch):
            self.visit(shape, walk_limits.NEARER)

    def probe(self, known_s: float, longer: float = 1.0) -> float:
        """Visit only the starts, and the same with fewer microbatches while memory has room for what these keep, in
        half of the time that is left; not those behind several that are far from the fastest step and hardly get
        faster, nor those whose floor is above it where steps are `longer` than floors. Returns the fastest step known
        then, `known_s` included. A later walk reuses the results."""
        self.known_s, self.deadline = min(self.known_s, known_s), self.context.timer.halfway
        shapes = self._shapes()
        hoped = [shape for shape in self._starts(shapes) if self.floors[shape] * longer <= self.least_s]
        begin = sorted(hoped, key=self.floors.__getitem__)
        far, before_s = 0, math.inf
        for left, shape in zip(reversed(range(len(begin))), begin, strict=True):
            self._slide(shape, shapes, walk_limits.NEARER, roomy=True)
            here_s = self._least_of(shape)
            if math.isfinite(here_s) and math.isfinite(before_s):
                at_this_pace_s = here_s * (here_s / before_s) ** left
                far = far + 1 if min(here_s, at_this_pace_s) > self.least_s * HONED else 0
            if far == walk_limits.SLOWER_STARTS:
                break
            before_s = here_s
        return self.least_s

    def _shapes(self) -> list[Shape]:
        """All shapes of the space, in order, with their floors."""
        shapes = self.space.shapes(self.context)
        for shape in shapes:
            known_s = max(self.floors.get(shape, 0.0), self.wider.get(shape, 0.0))
            self.floors[shape] = max(self.pricing.floor_s(shape, self.pricing.levels[0]), known_s)
        return shapes

    def _starts(self, shapes: list[Shape]) -> list[Shape]:
        """The shapes at which the walk starts."""
        return starts(shapes, self.context.request.cluster.levels[-1].size, self.context.batch)

    def run(self) -> Found | None:
        """Walk, polish and hone. Returns the best plan, which may still be slower than `known_s`; None where nothing
        fits or all shapes are beaten."""
        shapes = self._shapes()
        while True:
            self._walk(shapes)
            best = self.best
            rough = self._next_to_solve(best) if best is not None else None
            if rough is None:
                if self.far:
                    self._scatter()
                return self._honed(self.best)
            self._polish(rough)

    def _scatter(self) -> None:
        """Try whether the fastest results get faster if gradients may also be scattered after every microbatch."""
        near = [f for f in self.settled if f.step_s < self.known_s * HONED and f.shape not in self.scattered]
        for found in sorted(near, key=lambda found: found.step_s)[: walk_limits.SCATTERED]:
            self.scattered.add(found.shape)
            if not self._closes and (made := scattered(self.pricing, found)) is not None:
                self.found[found.shape] = made

    def _honed(self, best: Found | None) -> Found | None:
        """`best`, honed if it was solved exactly and may become the fastest known plan, and time is left."""
        if best is None or best.shape not in self.polished.keys() - self.refined or best.step_s >= self.known_s * HONED:
            return best
        late = partial(self._late, inside.takes_s(best))
        if late():
            self.hurried = True
            return best
        self.context.request.say(f"honing {best.shape}")
        self.refined.add(best.shape)
        better = with_other_stages(self.pricing, best, late)
        made = self.found[best.shape] = honed(self.context, self.space.name, better, late)
        return made

    def searched(self, known_s: float) -> float:
        """Seconds of the plan that `run` finds in half of the time that is left, given the fastest step known from
        elsewhere."""
        self.known_s, self.deadline = min(self.known_s, known_s), self.context.timer.halfway
        found = self.run()
        return found.step_s if found is not None else math.inf

    def _next_to_solve(self, best: Found) -> Found | None:
        """The next result to solve exactly: the best, then those near it that may be faster, if their bounds allow a
        faster step than is known from elsewhere, and none is far behind that. None where none is left."""
        proven, known_s = self.pricing.proven, self.known_s * (1 - PRICE_TOLERANCE)
        if best.shape not in self.polished and proven[best.shape] < known_s and best.step_s < self.known_s * HONED:
            return best
        near = [
            f
            for shape, f in self.fit.items()
            if shape not in self.polished
            and f.step_s <= min(best.step_s * walk_limits.GAINED, self.known_s * HONED)
            and proven[shape] < min(known_s, best.step_s * (1 - PRICE_TOLERANCE))
        ]
        return None if self._closes else min(near, key=lambda f: (f.step_s, f.shape), default=None)

    def _walk(self, shapes: list[Shape]) -> None:
        """Visit the starts, then neighbours of the best shapes, as the module docstring says."""
        begin = shapes if len(filled(shapes)) <= walk_limits.FEW_SHAPES and not self.wider else self._starts(shapes)
        slower, before_s = 0, math.inf
        for shape in sorted(begin, key=self.floors.__getitem__):
            self._slide(shape, shapes, self._near)
            if self.fit:  # neighbours of what is best are not to wait for starts that come out slower
                self._climb(shapes)
            here_s = self._least_of(shape)
            slower = slower + 1 if self.least_s * HONED < here_s > before_s else 0
            if slower == walk_limits.SLOWER_STARTS and begin is not shapes:
                break
            before_s = here_s
        while self._expand(shapes):
            pass

    def _least_of(self, shape: Shape) -> float:
        """The fastest step with the places and mesh of `shape` and any number of microbatches; for beaten shapes their
        proven bound; where none was visited, the floor of `shape`; infinite where nothing fits."""
        reached = (self._reached_s(other) for other in self.found if other.key == shape.key)
        return min(reached, default=self.floors[shape])

    def _climb(self, shapes: list[Shape]) -> None:
        """Visit neighbours of the best shape, as long as that finds a faster one."""
        before_s = math.inf
        while self._fastest_s < before_s * (1 - PRICE_TOLERANCE):
            before_s = self._fastest_s
            self._expand(shapes)

    @property
    def _fastest_s(self) -> float:
        """The fastest step of this walk, whether or not a faster one is known from elsewhere."""
        return min((found.step_s for found in self.fit.values()), default=math.inf)

    def _expand(self, shapes: list[Shape]) -> bool:
        """Visit the neighbours of the most promising shape. If one of them is faster than everything in this walk, stop
        there, so that its own neighbours come first. False where no shape is promising, or no time is left."""
        at = self._promising()
        if at is None:
            return False
        before_s = self._fastest_s
        for shape in neighbours(at, shapes):
            if self._closes:
                break
            self.visit(shape, walk_limits.NEARER)
            if self._fastest_s < before_s * (1 - PRICE_TOLERANCE):
                return True
        self.expanded.add(at)
        return True

    def _polish(self, found: Found) -> None:
        """Solve a shape exactly and lay it out as it runs. If that is slower than at the glance, shapes that were
        beaten by the glance may be visited again."""
        shape = found.shape
        self.polished[shape] = None
        exact = self.found[shape] = self.pricing.exact(found)
        if exact is None or exact.step_s > found.step_s * (1 + PRICE_TOLERANCE):
            again = {
                other
                for other, (near, before_s) in self.beaten.items()
                if self.least_s > before_s and self.pricing.proven[other] < self.least_s * near
            }
            self.beaten = {other: by for other, by in self.beaten.items() if other not in again}
            self.expanded.clear()
            self.found = {other: f for other, f in self.found.items() if other not in again}

    @property
    def _near(self) -> float:
        """The factor on the fastest known step up to which neighbours are visited."""
        return walk_limits.NEAR if len(filled([*self.floors])) <= walk_limits.MANY_SHAPES else walk_limits.NEARER

    def _promising(self) -> Shape | None:
        """The best shape that is not expanded, if it is near the best of all and time is left. While nothing fits, the
        visited shape of least floor."""
        if self._closes:
            self.hurried = True
            return None
        if self.fit:
            near_s = self.least_s * (self._near if self.far else walk_limits.NEARER)
            open_ = {
                shape: f.step_s for shape, f in self.fit.items() if shape not in self.expanded and f.step_s <= near_s
            }
            return min(open_, key=lambda shape: (open_[shape], shape), default=None)
        rest = [shape for shape in self.found if shape not in self.expanded and shape not in self.beaten]
        return min(rest, key=lambda shape: (self.floors[shape], shape), default=None)

    def _slide(self, shape: Shape, shapes: list[Shape], near: float, *, roomy: bool = False) -> None:
        """Visit `shape`, then the same with fewer and fewer microbatches, as long as the step gets shorter, and where
        that is to be `roomy` no block has to run again for it; no step is held against the bound of a beaten one before
        it."""
        before_s, bounded = math.inf, False
        while True:
            self.visit(shape, near)
            beaten, here_s = shape in self.beaten, self._reached_s(shape)
            fewer = [s for s in shapes if s.key == shape.key and s.microbatches < shape.microbatches]
            slower = shape in self.found and here_s >= before_s and (beaten or not bounded)
            if not fewer or slower or (beaten and self.wider):  # that: far from what the walk around this one has found
                return
            if roomy and not self._has_room(shape, fewer[-1]):
                return
            if shape in self.found:  # it was left out where so many microbatches take too long to start
                before_s, bounded = here_s, beaten
            shape = fewer[-1]

    def _has_room(self, shape: Shape, fewer: Shape) -> bool:
        """Whether the result on a shape leaves room for what `fewer` microbatches keep, of which each keeps more."""
        rest = self.context.rest_bytes / self.context.request.cluster.devices / self.context.mean_bytes(shape.places)
        found = self.found.get(shape)
        return found is not None and filled_with(found, fewer.microbatches, rest) <= FULL

    def _reached_s(self, shape: Shape) -> float:
        """Seconds of the result on a shape, or its proven bound where it is beaten; infinite where nothing fits, or it
        was not visited."""
        return found.step_s if (found := self.found.get(shape)) else self.pricing.proven.get(shape, math.inf)

    def _stays_behind(self, shape: Shape) -> bool:
        """Whether the floor of a shape is above the fastest known step, so that it need not be visited."""
        return self.floors[shape] > self.least_s * (1 - PRICE_TOLERANCE)

    def _raise_floor(self, shape: Shape) -> None:
        """Raise the floors of a shape, and of all that are bounded together with it, to what a quick look proves."""
        if self.quick_s is None or shape in self.raised or math.isinf(self.least_s):
            return
        if (
            must_rerun(self.context, shape, self.pricing.levels[0])
            or self.floors[shape] < self.least_s * walk_limits.HOPELESS
        ):
            return
        family = next(each for each in families(self.context, self.floors) if shape in each)
        bound_s = self.quick_s(family, self.least_s)
        self.raised.update(family)
        for each in family:
            self.floors[each] = max(self.floors[each], bound_s)

    def _late(self, spare_s: float = 0.0) -> bool:
        """Whether the deadline has passed, or is only `spare_s` away."""
        return time.monotonic() > self.deadline - spare_s

    @property
    def _closes(self) -> bool:
        """Whether the time that is left is for the best result: to solve it to the end, which takes about as long as
        its glance, to hone it, and for cuts inside of its blocks."""
        best = self.best
        if best is None or best.step_s >= self.known_s * HONED:
            return self._late()
        solving_s = 0.0 if best.shape in self.polished else self.took_s.get(best.shape, 0.0)
        return self._late(min(solving_s + 2 * inside.takes_s(best), walk_limits.CLOSING * self.context.timer.limit_s))

    def visit(self, shape: Shape, near: float) -> None:
        """Glance at a shape once, if its floor is below the fastest known step. Pricing ends when the shape is proven
        to take `near` times that."""
        if shape in self.found or self._stays_behind(shape):
            return
        if self._late():
            self.hurried = True
            return
        self._raise_floor(shape)
        if self._stays_behind(shape):
            return
        self.context.request.say(f"{self.space.name}: {shape}")
        self.found[shape], near, least_s, begun_s = None, min(near, self.reach), self.least_s, time.monotonic()
        try:
            self.found[shape] = self.pricing.glance(shape, least_s * near, least_s)
            self.took_s[shape] = time.monotonic() - begun_s
        except Beaten:
            self.beaten[shape] = near, least_s
        except InfeasibleError as error:
            self.why.append(f"{shape}: {error}")
