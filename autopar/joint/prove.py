"""A lower bound on the step time of all plans. Called by joint.fastest and joint.background_proof.

The bound is the least of many claims, each of the form "no plan on these shapes is faster than so many seconds". The
claim with the lowest bound is refined first. Its looks, each closer than the one before:

    floor      the least work, divided evenly over all devices, without communication; with offloading, also the least
               update on the host; or what one microbatch takes through all places, where that is more
    together   shapes that differ only in microbatches, by the least seconds of their passes with unlimited memory
               (those with fewer than places apart: their floors are higher).
               Neither operators nor collectives get cheaper per sample when they get smaller, so a bound for the fewest
               microbatches holds for all (not where a cache makes small data cheaper, `_spills`)
    short      of these the one with fewest microbatches, by what its memory leaves room for (joint.memory_bounds);
               where it is short of memory, the others are looked at again, from the first look on
    shape      one shape, by the least length of its timetables (pipeline.makespan_bound), with its memory limit: first
               in little time, as the first and the last microbatch wait

Naive pipelines are one claim, of which every look takes one shape at a time. Their floor is as many times the least
work as there are places, since these wait for each other.

The bound of one shape consists of:

    length    the least time that the schedule needs for the passes of all pieces, however these are cut into stages,
              and for sends in which each value is divided over all ranks (pipeline.makespan_bound)
    passes    the least seconds of the passes over all choices of layouts, by dual prices from cutting planes
              (joint.relaxed, joint.cutting_planes)
    places    places may have layouts of their own, so each block, and each operator outside of blocks, is bounded
              alone. Of the reshards in between, those from block to block are divided between the two where all places
              count alike (joint.block_chains); others are free
    memory    no plan holds more bytes than the devices have, as the search counts them. On each place, by dividing
              blocks among stages (pipeline.memory_bound); and for the limit of one place, or the mean of several, over
              all choices of layouts: a dual price of bytes weighs what blocks keep against running them again.
              Temporaries are not counted on several places

Plans with offloading have the same passes, another update, and on the device at least all bytes that do not belong to
weights. Their bound is that of the passes with those bytes and without an update, plus the least update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import offloading
from autopar.joint.claim_board import Board, Part
from autopar.joint.effort import CLOSEST, MOST_CASES, MOST_ROUNDS, Effort
from autopar.joint.memory_bounds import Room
from autopar.joint.pricing import Pricing
from autopar.joint.relaxed_solving import BOUND_TOLERANCE
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Alone, Timed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import FREE, NAIVE, SEARCH
from autopar.problem.settings import OFFLOADED
from autopar.recipes.free import spaces

QUICK_ROUNDS = 4
"""Rounds of cutting planes for a quick look: further rounds rarely raise the bound."""

LOOKS = (
    (True, Effort(0)),
    (True, Effort(QUICK_ROUNDS)),
    (False, Effort(QUICK_ROUNDS)),
    (False, Effort(MOST_ROUNDS, 256)),
    (False, Effort(MOST_ROUNDS, MOST_CASES)),
)
"""The looks after the floor, in order: whether shapes are bounded together, and the effort."""

CLOSEST_LOOKS = len(LOOKS)
"""Looks per claim at most where the bound is to be as high as possible."""

GLANCE_LOOKS, CLOSER_LOOKS = 3, 4
"""Looks per claim at most where proving may take about as long as the search: CLOSER_LOOKS at shapes of one place where
there are at most FEW_CLAIMS claims, GLANCE_LOOKS at others. By cases the bound of a pipeline rises by 1 or 2 % in more
than a minute."""

FEW_CLAIMS = 24

GOAL = 0.02
"""The relative gap at which a quick proof ends."""


Bound = Callable[[Alone | Timed, float, bool], float]
"""(a shape, a cutoff, whether something is offloaded) -> a lower bound in seconds, which need not be exact above the
cutoff."""


@dataclass(frozen=True)
class Claim:
    """No plan on any of `shapes`, in order of microbatches, takes less than `bound_s`. `looks`: how many of LOOKS were
    taken at it."""

    bound_s: float
    shapes: tuple[Shape, ...]
    looks: int = 0


def proven_s(
    context: SearchContext,
    known_s: float,
    mesh: tuple[int, ...] | None = None,
    *,
    closely: bool = True,
    deadline: float = math.inf,
    only: Sequence[Shape] = (),
) -> float:
    """A lower bound in seconds on the step of all plans, at most `known_s`, the step of a known plan. On clusters of
    several parts it is the least work.

        closely     take every look that may raise the bound; otherwise take about as long as a search
        deadline    begin no look, and no case, later than this (time.monotonic)
        mesh        the mesh of a known plan of one stage, to be included if the search would not try it
        only        bound the plans on these shapes only (empty: all)
    """
    prover = Prover(context, closely, mesh, only, deadline)
    while time.monotonic() < deadline and prover.look(known_s):
        pass
    return prover.proven_s(known_s)


def families(context: SearchContext, shapes: Iterable[Shape]) -> list[tuple[Shape, ...]]:
    """`shapes` that differ only in microbatches, in order of these, and that are therefore bounded together; those that
    do not fill their pipelines apart from others, as their floors are higher, and each alone where small data may be
    cheaper per byte."""
    spills = _spills(context.request.cluster)
    kin: dict[tuple[int, ...], list[Shape]] = {}
    for shape in sorted(shapes):
        kin.setdefault((*shape.key, shape.unfilled, shape.microbatches * spills), []).append(shape)
    return [tuple(each) for each in kin.values()]


def must_rerun(context: SearchContext, shape: Shape, level: str) -> bool:
    """Whether more blocks must run again than at `level` to fit, even if all that is held were cut evenly. Bounds
    ignore memory, so that a quick look proves little of such a shape."""
    return context.held_bytes(shape, level) > context.mean_bytes(shape.places)


def _spills(cluster: Cluster) -> bool:
    """Whether small data may be cheaper per byte, by what was measured of caches."""
    return cluster.device.cache_bytes > 0 or any(
        protocol.spill > 1.0 for level in cluster.levels for protocol in level.protocols
    )


@dataclass(eq=False)
class Prover:
    """Refines the claims about all shapes of one graph, or about `only` some. `board` has the state of each claim. The
    arguments are those of `proven_s`; looks by cases end at `ends_at` (time.monotonic)."""

    context: SearchContext
    closely: bool = True
    mesh: tuple[int, ...] | None = None
    only: Sequence[Shape] = ()
    ends_at: float = math.inf
    _bounded: dict[Shape, Alone | Timed | None] = field(default_factory=dict)

    @cached_property
    def pricing(self) -> Pricing:
        """The Problems and timetables of shapes."""
        return Pricing(self.context, SEARCH)

    @cached_property
    def naive(self) -> Pricing:
        """The Problems and timetables of naive pipelines."""
        return Pricing(self.context, NAIVE)

    def _pricing_of(self, shape: Shape) -> Pricing:
        """The Pricing of the space that a shape is in."""
        return self.naive if shape.naive else self.pricing

    @cached_property
    def room(self) -> Room:
        """The bounds by memory."""
        return Room(self.context)

    @cached_property
    def all_claims(self) -> list[Claim]:
        """The initial claims, in the order of their numbers on the board."""
        return self.claims()

    @cached_property
    def board(self) -> Board:
        """The state of all claims, which several processes may share."""
        return Board(
            [Part(claim.bound_s, 0, len(claim.shapes), 0) for claim in self.all_claims],
            [min(self.most_looks, self._worth(claim.shapes[0])) for claim in self.all_claims],
        )

    def _worth(self, shape: Shape) -> int:
        """How many looks at a shape are worth their time."""
        return CLOSEST_LOOKS if self.closely or shape.places == 1 else GLANCE_LOOKS

    @property
    def most_looks(self) -> int:
        """How many looks at one claim are taken at most."""
        if self.context.request.cluster.parts:
            return 0
        return CLOSEST_LOOKS if self.closely else CLOSER_LOOKS if len(self.all_claims) <= FEW_CLAIMS else GLANCE_LOOKS

    def enough_s(self, known_s: float) -> float:
        """The bound at which proving ends, given the step of a known plan: nothing is gained above that of a claim that
        has had all its looks."""
        return min(known_s if self.closely else known_s / (1 + GOAL), self.board.settled_s)

    def proven_s(self, known_s: float) -> float:
        """The lower bound that the looks so far have proven, at most `known_s`."""
        return min(known_s, self.board.proven_s(self.enough_s(known_s)))

    def look(self, known_s: float, who: int = 0) -> bool:
        """Take one more look at the claim with the lowest bound that no other process is looking at. False where no
        look can raise the bound any further. `who` is the number of this process."""
        enough_s = self.enough_s(known_s)
        taken = self.board.take(who, enough_s)
        if taken is None:
            return False
        index, part = taken
        self._look(index, part, enough_s if part.looks else known_s)  # the search, too, asks for first looks
        return True

    def first_look_s(self, shapes: tuple[Shape, ...], known_s: float, who: int = 0) -> float | None:
        """A lower bound on all plans on `shapes`, which are bounded together: what the first look at their claim
        proves. It is taken now, unless it was before; what it makes is not kept. None while another process takes
        it."""
        index = self._claim_of[shapes[0]]
        if (part := self.board.take_first(who, index)) is not None:
            self._look(index, part, known_s)
            self._bounded.clear()
        return self.board.first_s(index)

    @cached_property
    def _claim_of(self) -> Mapping[Shape, int]:
        """The number of the claim that each shape is in."""
        return {shape: index for index, claim in enumerate(self.all_claims) for shape in claim.shapes}

    def _look(self, index: int, part: Part, cutoff_s: float) -> None:
        """Take the next look at a part of claim number `index`, which this process owns, and tell the board. Bounds
        above `cutoff_s` need not be exact."""
        claim, at, made = (
            Claim(part.bound_s, self.all_claims[index].shapes[part.begin : part.end], part.looks),
            part.begin,
            list[Part](),
        )
        for closer in self.closer(claim, cutoff_s):
            made.append(Part(closer.bound_s, at, at + len(closer.shapes), closer.looks))
            at += len(closer.shapes)
        self.board.tell(index, made)

    def shapes(self) -> list[Shape]:
        """All shapes of plans: one place and one microbatch on every mesh, and the shapes that the search may
        choose."""
        if self.only:
            return list(self.only)
        request = self.context.request
        flat = [request.mesh] if request.mesh is not None else spaces(request.cluster, self.context.whole.cuts_samples)
        flat = flat if self.mesh is None else list(dict.fromkeys([*flat, self.mesh]))
        return [
            *(Shape(1, mesh, 1) for mesh in flat),
            *(shape for each in FREE if request.settings.training for shape in each.shapes(self.context)),
        ]

    def claims(self) -> list[Claim]:
        """The initial claims, with their floors: one for each set of shapes that may be bounded together, and one for
        all naive pipelines, those of the lowest floors first."""
        shapes = self.shapes()
        together = families(self.context, [shape for shape in shapes if not shape.naive])
        naive = tuple(sorted((shape for shape in shapes if shape.naive), key=self.floor_s))
        return [Claim(min(map(self.floor_s, each)), each) for each in (*together, naive) if each]

    def closer(self, claim: Claim, cutoff_s: float) -> Iterator[Claim]:
        """`claim` after one more look. Where that look takes one shape at a time, the claim is divided: the first shape
        with its new bound, and the others with the old one. Bounds above `cutoff_s` need not be exact."""
        together, effort = LOOKS[claim.looks]
        effort = replace(effort, ends_at=self.ends_at)
        first, others = claim.shapes[:1], claim.shapes[1:]
        self.context.request.say(f"proving: {first[0]}")
        if together and not first[0].naive:
            yield from self._together(claim, cutoff_s, effort)
            return
        bound_s = self.together_s(first, cutoff_s, effort) if together else self.bound_s(first[0], cutoff_s, effort)
        yield Claim(max(claim.bound_s, bound_s), first, claim.looks + 1)
        if others:
            yield Claim(max(claim.bound_s, self.floor_s(others[0]) if first[0].naive else 0.0), others)

    def _together(self, claim: Claim, cutoff_s: float, effort: Effort) -> Iterator[Claim]:
        """`claim` after a look at all of its shapes together, with unlimited memory. Where the first one, of fewest
        microbatches, is short of memory, a second look is at that alone, and the others are looked at again from the
        beginning."""
        first, others = claim.shapes[:1], claim.shapes[1:]
        short_s = self.short_s(first[0]) if claim.looks and self._is_short(first[0]) else 0.0
        if short_s > claim.bound_s * (1 + BOUND_TOLERANCE):
            roomy_s = self.together_s(first, cutoff_s, effort) if short_s < cutoff_s else 0.0
            yield Claim(max(short_s, roomy_s), first, claim.looks + 1)
            if others:
                yield Claim(claim.bound_s, others)
            return
        bound_s = self.together_s(claim.shapes, cutoff_s, effort)
        yield Claim(max(claim.bound_s, bound_s), claim.shapes, claim.looks + 1)

    def _is_short(self, shape: Shape) -> bool:
        """Whether the first place of a shape, which keeps as many microbatches as there are places, would have blocks
        to run again if all that is held were cut evenly. Elsewhere a look at memory seldom proves more."""
        rest_bytes = self.context.rest_bytes / self.context.request.cluster.devices
        kept_bytes = (self.context.held_bytes(shape, "none") - rest_bytes) * min(shape.places, shape.microbatches)
        return rest_bytes + kept_bytes > self.context.mean_bytes(shape.places)

    def floor_s(self, shape: Shape) -> float:
        """The least work in seconds on all devices of a shape; of naive pipelines with the wait of places for each
        other."""
        return self._pricing_of(shape).floor_s(shape, "none")

    def together_s(self, shapes: tuple[Shape, ...], cutoff_s: float = math.inf, effort: Effort = LOOKS[1][1]) -> float:
        """A lower bound in seconds on all plans on `shapes`, in order of microbatches, with unlimited memory."""
        return self._least_s(
            shapes, lambda here, cutoff_s, hosted: here.roomy_s(cutoff_s, effort, hosted=hosted), cutoff_s
        )

    def bound_s(self, shape: Shape, cutoff_s: float = math.inf, effort: Effort = CLOSEST) -> float:
        """A lower bound in seconds on all plans on `shape`, which need not be exact above `cutoff_s`; infinite where
        there is no such plan."""

        def closest_s(here: Alone | Timed, cutoff_s: float, hosted: bool) -> float:
            short_s = self.room.bound_s(here, hosted=hosted)
            return short_s if short_s >= cutoff_s else max(short_s, here.bound_s(cutoff_s, effort, hosted=hosted))

        return self._least_s((shape,), closest_s, cutoff_s)

    def short_s(self, shape: Shape) -> float:
        """A lower bound in seconds on all plans on `shape` by what its memory leaves room for, in little time."""
        return self._least_s((shape,), lambda here, cutoff_s, hosted: self.room.bound_s(here, hosted=hosted), math.inf)

    def _least_s(self, shapes: tuple[Shape, ...], least: Bound, cutoff_s: float) -> float:
        """`least` of the first of `shapes` that has any plan, over plans with and without offloading."""
        here = next((here for here in map(self._bounds_of, shapes) if here is not None), None)
        if here is None:
            return math.inf
        if self.context.request.cluster.parts:
            return 0.0
        least_s = least(here, cutoff_s, False)
        late_s = min((there.late_s for there in self._hosted), default=math.inf)
        if min(map(self.floor_s, shapes)) + late_s >= min(least_s, cutoff_s):
            return least_s
        return min(least_s, late_s + least(here, min(least_s, cutoff_s) - late_s, True))

    def _bounds_of(self, shape: Shape) -> Alone | Timed | None:
        """The bounds of a shape, made once; None where it has no plan."""
        if shape not in self._bounded:
            try:
                self._bounded[shape] = (
                    Alone(self.context, shape)
                    if (shape.places, shape.microbatches) == (1, 1)
                    else Timed(self.context, self._pricing_of(shape), shape)
                )
            except InfeasibleError:
                self._bounded[shape] = None
        return self._bounded[shape]

    @cached_property
    def _hosted(self) -> list[SearchContext]:
        """The contexts with something offloaded, if the search considers that."""
        return [self.context.hosted(held) for held in OFFLOADED[1:]] if offloading.may(self.context.request) else []
