"""A lower bound on the step of all plans: claims about shapes ("no plan on these is faster than so many seconds"), refined, always the lowest first.

    floor      the least work, cut evenly over all devices with nothing sent; with offloading, also the least update on the host
    together   shapes that differ in microbatches only, by what their passes take with unlimited memory. No operator and no collective gets cheaper
               per sample when it gets smaller, so a bound for the fewest microbatches holds for all (except where data that stays in a cache is cheaper)
    shape      one of them, by the least length of its timetables (pipeline.makespan_bound) and with its memory limit

What the bound of one shape is made of:

    length    a pipeline takes at least as long as its schedule needs for the passes of all pieces together, however these are cut, and for
              sends in which each value is cut over all ranks (pipeline.makespan_bound)
    passes    for all choices of layouts, the least that passes take, at prices found by cutting planes (joint.relaxed, joint.cutting_planes)
    places    may have layouts of their own: each block, and each operator outside of blocks, is bounded by itself, with free reshards in between
    memory    a plan holds no more bytes than there are, as the search counts them: on one place by its own limit, on several by the mean over
              places. At a price of bytes, what blocks keep is weighed against running them again. Temporaries are not counted on several places

Plans with offloading have the same passes, another update, and at least the bytes that do not belong to weights on the device. Their bound is that of
the passes with those bytes and without any update, plus the least update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import offloading
from autopar.joint.claim_board import Board, Part
from autopar.joint.effort import CASES, CLOSEST, ROUNDS, Effort
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Alone, Timed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.problem.settings import OFFLOADED
from autopar.recipes.free import spaces

FEW = 4
"""Rounds of cutting planes, where more of them rarely prove more."""

LOOKS = ((True, Effort(0)), (True, Effort(FEW)), (False, Effort(ROUNDS, 128)), (False, Effort(ROUNDS, CASES)))
"""Behind the floor: whether shapes are looked at together, and how closely."""

CLOSE = len(LOOKS)
"""Looked at as closely as can be."""

GLANCE, CLOSER = 2, 3
"""So many looks at all claims take no longer than the search of the answer did; and at few of them."""

SMALL = 24
"""So many claims are few."""

GOAL = 0.02
"""A gap that nobody wants smaller where planning is not to take long."""


Bound = Callable[[Alone | Timed, float, bool], float]
"""Seconds that nothing on a shape beats, given from where on they need not be exact, and whether something is on the host."""


@dataclass(frozen=True)
class Claim:
    """Seconds that no plan on any of `shapes` beats, those with fewest microbatches first; looked at so many times (LOOKS)."""

    bound_s: float
    shapes: tuple[Shape, ...]
    looks: int = 0


def proven_s(context: SearchContext, known_s: float, mesh: tuple[int, ...] | None = None, *, closely: bool = True, deadline: float = math.inf, only: Sequence[Shape] = ()) -> float:
    """Seconds that no plan beats, `known_s`, the step of one that there is, at most: as `closely` as can be, or in about the time of a search, and with no look that begins behind
    `deadline` (time.monotonic). `mesh` is that of a plan of one stage, which may be none that is always searched; of plans on some shapes `only`, where there are any. On clusters of
    several parts that is only the least work."""
    prover = Prover(context, closely, mesh, only)
    while time.monotonic() < deadline and prover.look(known_s):
        pass
    return prover.proven_s(known_s)


def _spills(cluster: Cluster) -> bool:
    """Whether anything is cheaper per byte where there is less of it: what was measured of caches."""
    return cluster.device.cache_bytes > 0 or any(protocol.spill > 1.0 for level in cluster.levels for protocol in level.protocols)


@dataclass(eq=False)
class Prover:
    """Bounds of all shapes of one graph, or `only` of some; what is proven of which claim is on its `board`."""

    context: SearchContext
    closely: bool = True
    mesh: tuple[int, ...] | None = None
    only: Sequence[Shape] = ()
    _bounded: dict[Shape, Alone | Timed | None] = field(default_factory=dict)

    @cached_property
    def pricing(self) -> Pricing:
        """What knows the Problems and timetables of shapes."""
        return Pricing(self.context, SEARCH)

    @cached_property
    def all_claims(self) -> list[Claim]:
        """Those that there are in the beginning."""
        return self.claims()

    @cached_property
    def board(self) -> Board:
        """Of all claims."""
        return Board([Part(claim.bound_s, 0, len(claim.shapes), 0) for claim in self.all_claims], self.most_looks)

    @property
    def most_looks(self) -> int:
        """So many looks at the same claim, at most."""
        if self.context.request.cluster.parts:
            return 0
        return CLOSE if self.closely else CLOSER if len(self.all_claims) <= SMALL else GLANCE

    def enough_s(self, known_s: float) -> float:
        """Nobody asks for a proof of more, given the step of a plan that there is."""
        return min(known_s, self.board.settled_s) if self.closely else known_s / (1 + GOAL)

    def proven_s(self, known_s: float) -> float:
        """Seconds that no plan beats by what was looked at so far, `known_s` at most."""
        return min(known_s, self.board.proven_s(self.enough_s(known_s)))

    def look(self, known_s: float, who: int = 0) -> bool:
        """Look once more at the claim that nobody else looks at of which least is proven; False where that proves nothing that is asked for."""
        enough_s = self.enough_s(known_s)
        taken = self.board.take(who, enough_s)
        if taken is None:
            return False
        index, part = taken
        claim, at, made = Claim(part.bound_s, self.all_claims[index].shapes[part.begin:part.end], part.looks), part.begin, list[Part]()
        for closer in self.closer(claim, enough_s):
            made.append(Part(closer.bound_s, at, at + len(closer.shapes), closer.looks))
            at += len(closer.shapes)
        self.board.tell(index, made)
        return True

    def shapes(self) -> list[Shape]:
        """One place and one microbatch on every mesh, and all that the search may choose beside that."""
        if self.only:
            return list(self.only)
        request = self.context.request
        flat = [request.mesh] if request.mesh is not None else spaces(request.cluster, self.context.whole.cuts_samples)
        flat = flat if self.mesh is None else list(dict.fromkeys([*flat, self.mesh]))
        return [*(Shape(1, mesh, 1) for mesh in flat), *(SEARCH.shapes(self.context) if request.settings.training else ())]

    def claims(self) -> list[Claim]:
        """The least work there is, of all shapes that may be looked at together."""
        spills = _spills(self.context.request.cluster)
        kin: dict[tuple[int, ...], list[Shape]] = {}
        for shape in sorted(self.shapes()):
            kin.setdefault((*shape.key, shape.microbatches * spills), []).append(shape)
        return [Claim(min(map(self.floor_s, shapes)), tuple(shapes)) for shapes in kin.values()]

    def closer(self, claim: Claim, cutoff_s: float) -> Iterator[Claim]:
        """The same looked at once more; where shapes are not looked at together any more the first one, and the others together from the beginning. Nothing above `cutoff_s` is exact."""
        together, effort = LOOKS[claim.looks]
        first, others = claim.shapes[:1], claim.shapes[1:]
        self.context.request.say(f"proving: {first[0]}")
        if together:
            yield Claim(max(claim.bound_s, self.together_s(claim.shapes, cutoff_s, effort)), claim.shapes, claim.looks + 1)
            return
        yield Claim(max(claim.bound_s, self.bound_s(first[0], cutoff_s, effort)), first, claim.looks + 1)
        if others:
            yield Claim(claim.bound_s, others)

    def floor_s(self, shape: Shape) -> float:
        """Its share of the least work there is."""
        return self.context.work(shape.places).step_s(self.context.request.cluster.devices, shape.places, shape.microbatches)

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
        if self.context.request.cluster.parts:
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
                self._bounded[shape] = Alone(self.context, shape) if shape.microbatches == 1 else Timed(self.context, self.pricing, shape)
            except InfeasibleError:
                self._bounded[shape] = None
        return self._bounded[shape]

    @cached_property
    def _hosted(self) -> list[SearchContext]:
        """What the search may put on the host."""
        return [self.context.hosted(held) for held in OFFLOADED[1:]] if offloading.may(self.context.request) else []
