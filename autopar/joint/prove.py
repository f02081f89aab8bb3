"""What no plan is faster than: claims of shapes, looked at closer and closer, the lowest one first.

    floor      the least work there is, cut over all devices, nothing sent; and, with what goes to the host, the least update there
    together   shapes that differ in microbatches alone, by what their passes take with all the memory there is: no operator and no collective gets cheaper per
               sample when it gets smaller, so that what is proven with the fewest microbatches holds for all (but not where what stays in a cache is cheaper)
    shape      one of them: how long its timetables make of the passes of all pieces (pipeline.least), and with the memory there is

Of what one shape is proven of:

    length    a pipeline takes no less than its schedule makes of the passes of all pieces together, however these are cut (pipeline.least)
    passes    the choices of layouts: what their passes take at least, at prices that cutting planes find (joint.relaxed, joint.cutting)
    places    may be laid out each in its own way: a block, and each operator outside, is bounded by itself, and what goes between takes nothing
    memory    no plan has more bytes than there are, by the count of the search: on one place its own, on several the mean over places. At a
              price of bytes what blocks gain by keeping something is weighed against running them again. What is there for a moment only is not
              counted on several places

Plans with something on the host have the passes of all others, another update, and no less memory on the device than what is not of weights: of them is proven what
holds with that and no update at all, and the least update.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import offloading
from autopar.joint.bounded import Alone, Timed
from autopar.joint.effort import CASES, CLOSEST, ROUNDS, Effort, Meter
from autopar.joint.inner import Inner
from autopar.joint.pricing import Pricing
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.problem.settings import OFFLOADED
from autopar.recipes.free import spaces

FEW = 4
"""Rounds of cutting planes, where more of them rarely prove more."""

LOOKS = ((True, Effort(0)), (True, Effort(FEW)), (False, Effort(FEW)), (False, Effort(ROUNDS, 32)), (False, Effort(ROUNDS, 128)), (False, Effort(ROUNDS, CASES)))
"""Behind the floor: whether shapes are looked at together, and how closely."""

CLOSE = len(LOOKS)
"""Looked at as closely as can be."""

GLANCE = 2
"""So many looks at all claims take no longer than the search of the answer did."""

SMALL, EACH, SHAPE = 24, 4, 15
"""Of so few claims some are looked at closer, for so many cases (joint.cases) for each of them all: those of the lowest, where a shape that was not looked at before takes as long as so many."""

GOAL = 0.02
"""A gap that nobody wants smaller where planning is not to take long."""


Bound = Callable[[Alone | Timed, float, bool], float]
"""Seconds that nothing on a shape beats, given from where on they need not be exact, and whether something is on the host."""


@dataclass(order=True)
class Claim:
    """Seconds that no plan on any of `shapes` beats, those with fewest microbatches first; looked at so many times (LOOKS)."""

    bound_s: float
    shapes: tuple[Shape, ...]
    looks: int = field(compare=False, default=0)


def proven_s(inner: Inner, known_s: float, mesh: tuple[int, ...] | None = None, *, closely: bool = True, deadline: float = math.inf) -> float:
    """Seconds that no plan beats, `known_s`, the step of one that there is, at most: as `closely` as can be, or in about the time of a search, and with no look that begins behind
    `deadline` (time.monotonic). `mesh` is that of a plan of one stage, which may be none that is always searched. On clusters of several parts that is only the least work."""
    prover, least_s = Prover(inner, mesh=mesh), known_s if closely else known_s / (1 + GOAL)
    claims = prover.claims()
    heapq.heapify(claims)
    if not closely:
        prover.meter.left = EACH * len(claims) if len(claims) <= SMALL else 0.0
    while claims and claims[0].bound_s < least_s and claims[0].looks < prover.most_looks and time.monotonic() < deadline:
        for claim in prover.closer(heapq.heappop(claims), least_s):
            heapq.heappush(claims, claim)
            if claim.looks == CLOSE:
                least_s = min(least_s, claim.bound_s)
    return min([known_s, *(claim.bound_s for claim in claims)])


def _spills(cluster: Cluster) -> bool:
    """Whether anything is cheaper per byte where there is less of it: what was measured of caches."""
    return cluster.device.cache_bytes > 0 or any(protocol.spill > 1.0 for level in cluster.levels for protocol in level.protocols)


@dataclass(eq=False)
class Prover:
    """Bounds of all shapes of one graph."""

    inner: Inner
    meter: Meter = field(default_factory=Meter)
    mesh: tuple[int, ...] | None = None
    _bounded: dict[Shape, Alone | Timed | None] = field(default_factory=dict)

    @cached_property
    def pricing(self) -> Pricing:
        """What knows the Problems and timetables of shapes."""
        return Pricing(self.inner, SEARCH)

    @property
    def most_looks(self) -> int:
        """So many looks at the same claim, at most."""
        if self.inner.request.cluster.parts:
            return 0
        return CLOSE if self.meter.left > 0 else GLANCE

    def shapes(self) -> list[Shape]:
        """One place and one microbatch on every mesh, and all that the search may choose beside that."""
        request = self.inner.request
        flat = [request.mesh] if request.mesh is not None else spaces(request.cluster, self.inner.whole.cuts_samples)
        flat = flat if self.mesh is None else list(dict.fromkeys([*flat, self.mesh]))
        return [*(Shape(1, mesh, 1) for mesh in flat), *(SEARCH.shapes(self.inner) if request.settings.training else ())]

    def claims(self) -> list[Claim]:
        """The least work there is, of all shapes that may be looked at together."""
        spills = _spills(self.inner.request.cluster)
        kin: dict[tuple[int, ...], list[Shape]] = {}
        for shape in sorted(self.shapes()):
            kin.setdefault((*shape.key, shape.microbatches * spills), []).append(shape)
        return [Claim(min(map(self.floor_s, shapes)), tuple(shapes)) for shapes in kin.values()]

    def closer(self, claim: Claim, cutoff_s: float) -> Iterator[Claim]:
        """The same looked at once more; where shapes are not looked at together any more the first one, and the others together from the beginning. Nothing above `cutoff_s` is exact."""
        together, effort = LOOKS[claim.looks]
        effort, first, others = replace(effort, meter=self.meter), claim.shapes[:1], claim.shapes[1:]
        self.inner.request.say(f"proving: {first[0]}")
        if together:
            yield Claim(max(claim.bound_s, self.together_s(claim.shapes, cutoff_s, effort)), claim.shapes, claim.looks + 1)
            return
        if first[0] not in self._bounded:
            self.meter.spend(SHAPE)
        yield Claim(max(claim.bound_s, self.bound_s(first[0], cutoff_s, effort)), first, claim.looks + 1)
        if others:
            yield Claim(claim.bound_s, others)

    def floor_s(self, shape: Shape) -> float:
        """Its share of the least work there is."""
        return self.inner.work(shape.places).step_s(self.inner.request.cluster.devices, shape.places, shape.microbatches)

    def together_s(self, shapes: tuple[Shape, ...], cutoff_s: float = math.inf, effort: Effort = LOOKS[1][1]) -> float:
        """Seconds that no plan on `shapes`, those with fewest microbatches first, beats with all the memory there is."""
        return self._least_s(shapes, lambda here, cutoff_s, hosted: here.roomy_s(cutoff_s, effort, hosted=hosted), cutoff_s)

    def bound_s(self, shape: Shape, cutoff_s: float = math.inf, effort: Effort = CLOSEST) -> float:
        """Seconds that no plan on `shape` beats, not exact above `cutoff_s`; infinite where nothing is possible there."""
        return self._least_s((shape,), lambda here, cutoff_s, hosted: here.bound_s(cutoff_s, effort, hosted=hosted), cutoff_s)

    def _least_s(self, shapes: tuple[Shape, ...], least: Bound, cutoff_s: float) -> float:
        """`least` of the first of `shapes` on which anything is possible: of what is on the devices, and of what has something on the host."""
        here = next((here for here in map(self._here, shapes) if here is not None), None)
        if here is None:
            return math.inf
        if self.inner.request.cluster.parts:
            return 0.0
        least_s = least(here, cutoff_s, False)
        late_s = min((there.late_s for there in self._hosted), default=math.inf)
        if self.floor_s(shapes[0]) + late_s >= min(least_s, cutoff_s):
            return least_s
        return min(least_s, late_s + least(here, min(least_s, cutoff_s) - late_s, True))

    def _here(self, shape: Shape) -> Alone | Timed | None:
        """What bounds a shape; None where nothing is possible there."""
        if shape not in self._bounded:
            try:
                self._bounded[shape] = Alone(self.inner, shape) if shape.microbatches == 1 else Timed(self.inner, self.pricing, shape)
            except InfeasibleError:
                self._bounded[shape] = None
        return self._bounded[shape]

    @cached_property
    def _hosted(self) -> list[Inner]:
        """What the search may put on the host."""
        return [self.inner.hosted(held) for held in OFFLOADED[1:]] if offloading.may(self.inner.request) else []
