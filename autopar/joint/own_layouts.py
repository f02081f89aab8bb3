"""Different layouts for each place of a pipeline, to suit its memory, devices and links. Called by joint.choice.

The search first chooses the same layouts for all places: those that are best for all together. That is not best for
each. The first places of 1F1B keep more microbatches than the last ones; a part of the cluster may have less memory, or
slower links inside its nodes. So the result is refined place by place, with its cut into stages fixed: the Problem of
one place is that of the shape, with each piece of the model weighted by how much of it the place has, and with that
place's memory. On a mesh of two axes one place may then use both for data parallelism, while another uses the inner one
for tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint.kept_results import Fuller, opens
from autopar.joint.parted_graph import only_place
from autopar.joint.search_context import SHAPE_SOLVE_S, SearchContext
from autopar.joint.shape_problems import Apart, Chosen, Models
from autopar.joint.staging import Found, lay
from autopar.pipeline.filling import piece_ranges
from autopar.pipeline.in_flight import per_microbatch, place_bytes
from autopar.pipeline.memory_shares import rooms
from autopar.pipeline.orders import Flying
from autopar.pipeline.stage_views import View, views
from autopar.problem.graph import Program
from autopar.problem.nets import Link
from autopar.problem.step_shares import held_bytes
from autopar.problem.types import Net, Node, Problem
from autopar.search import ilp

BETTER = 1e-3  # relative: what a place gains at least for a layout of its own


def each_apart(context: SearchContext, found: Found) -> Found:
    """`found`, or the same shape under the same timetable with layouts of its own for each place, where that is faster
    and fits."""
    if found.table.places == 1:
        return found
    context.request.say(f"{found.shape}: each place in its own way")
    seen = views(context.whole.program, found.plan)
    alone = only_place(found.chosen.model, context.whole.program, found.plan, seen)
    offered = [
        chosen
        for place in _probed(found)
        for chosen in _offered(context, found, PlaceWeights.of(found, place, context.whole.program, seen, alone), place)
    ]
    offered += _kept_otherwise(context, found)
    each = tuple(_best(found, place, offered) for place in range(found.table.places))
    alike = found.chosen
    if all(chosen is alike for chosen in each):
        return found
    apart = Apart(
        alike.models, alike.model, alike.solution, alike.level, alike.apart, alike.all_again, alike.bound_s, each=each
    )
    with suppress(InfeasibleError):
        other = lay(context, found.plan.strategy, found.shape, found.table, found.ground, apart, whole=True)
        return replace(other, alike_s=found.step_s) if other.step_s < found.step_s * (1 - PRICE_TOLERANCE) else found
    return found


def _probed(found: Found) -> list[int]:
    """The places that are solved: of each kind the first, the one in the middle and the last. Those between have less
    to keep than one of these and more than another, so that what is best for them is among what is best for these, or
    near it."""
    kinds: dict[int, list[int]] = {}
    for place, kind in enumerate(found.ground.kinds):
        kinds.setdefault(kind, []).append(place)
    return [
        place for places in kinds.values() for place in dict.fromkeys((places[0], places[len(places) // 2], places[-1]))
    ]


def _offered(context: SearchContext, found: Found, weights: PlaceWeights, place: int) -> Iterator[Chosen]:
    """Candidates for a place, as long as time is left: the optimum with nothing run again, with all blocks run again at
    each level, and at a price per byte, which is what running some blocks again costs."""
    alike, here = found.chosen, _Place.of(found, place)
    models = alike.models.kinds[here.kind]
    for level, byte_s, again in _wanted(context, alike, here):
        if context.timer.skips():
            return
        problem = weights.problem(models, level, alike.solution.choice, byte_s)
        with suppress(InfeasibleError):
            yield replace(alike, solution=ilp.glance(problem, time_limit_s=SHAPE_SOLVE_S), level=again, kept=None)


def _kept_otherwise(context: SearchContext, found: Found) -> Iterator[Chosen]:
    """Candidates with the common layouts, in which blocks that run again keep other results; none where time is up."""
    if opens(found, context.whole) and not context.timer.skips():
        opened, kept = Fuller.of(found.chosen, context.whole), found.chosen.levels(context.whole)
        yield from (chosen for scope in kept for chosen in opened.ways(scope, kept))


def _best(found: Found, place: int, offered: Sequence[Chosen]) -> Chosen:
    """The fastest candidate for a place; the common layouts where none is faster."""
    here = _Place.of(found, place)
    best, best_s = found.chosen, here.time_s(found.chosen) * (1 - BETTER)
    for other in offered:
        if (other_s := here.time_s(other)) < best_s:
            best, best_s = other, other_s
    return best


def _wanted(context: SearchContext, alike: Chosen, here: _Place) -> Iterator[tuple[str, float, str]]:
    """What to solve for a place: a level of the Problem, seconds per byte (0: a memory limit instead), and the level at
    which blocks run again if memory requires it."""
    first, *levels = context.whole.open_levels
    if alike.all_again or not levels:
        yield first, 0.0, first
        return
    yield first, 0.0, alike.level if alike.level != first else levels[-1]
    if not here.again(alike):
        return
    for level in levels:
        if (byte_s := here.byte_s(replace(alike, level=level))) > 0:
            yield first, byte_s, level
        yield level, 0.0, level


@dataclass(frozen=True, eq=False)
class _Place:
    """One place of a found pipeline: its number and kind; for each of its stages the pieces `[first, stop)` and the
    microbatches in flight when it is fullest; and each stage's bytes (`rooms`, pipeline.memory_shares) of the memory
    limit, which is lowered by what the walk over the emitted program counted beyond the sum of pieces."""

    number: int
    kind: int
    stages: tuple[tuple[int, int, Flying], ...]
    rooms: tuple[tuple[float, float], ...]

    @staticmethod
    def of(found: Found, place: int) -> _Place:
        """The place with that number."""
        kind, table = found.ground.kinds[place], found.table
        pieces = found.chosen.on(place, kind)
        ranges = piece_ranges(found.cuts.bounds, len(pieces.costs))
        here = table.of_place(place, range(table.stages))
        parts = table.of_place(place, found.cuts.parts([pieces] * table.stages))
        more = max(0.0, found.places_bytes[place] - place_bytes(parts, table.in_flight[place]))
        fullest = table.in_flight[place].fullest(*per_microbatch(parts))
        stages = tuple((*ranges[index], flying) for index, flying in zip(here, fullest, strict=True))
        return _Place(
            place,
            kind,
            stages,
            tuple(
                rooms(
                    [pieces.table.need(flying, first, stop) for first, stop, flying in stages],
                    found.ground.limits[place] - more,
                )
            ),
        )

    def again(self, chosen: Chosen) -> float:
        """How many of its pieces run again so that it fits; infinite where it does not fit."""
        table = chosen.on(self.number, self.kind).table
        counts = [table.again(*stage, *room) for stage, room in zip(self.stages, self.rooms, strict=True)]
        return math.inf if None in counts else sum(n for n in counts if n)

    def time_s(self, chosen: Chosen) -> float:
        """Seconds of a microbatch, and of what it does once; infinite where it does not fit."""
        pieces, total_s = chosen.on(self.number, self.kind), 0.0
        for (first, stop, flying), room in zip(self.stages, self.rooms, strict=True):
            again = pieces.table.again(first, stop, flying, *room)
            if again is None:
                return math.inf
            total_s += pieces.table.time_s(first, stop, again)
        return total_s

    def byte_s(self, chosen: Chosen) -> float:
        """The price of memory: seconds of a microbatch per byte that running all blocks again frees; 0 where it frees
        none."""
        table = chosen.on(self.number, self.kind).table
        saved = sum(table.saved(*stage) for stage in self.stages)
        more_s = sum(float(table.more[stop] - table.more[first]) for first, stop, _ in self.stages)
        return max(0.0, more_s / saved) if saved > 0 else 0.0


@dataclass(frozen=True, eq=False)
class PlaceWeights:
    """How much of each piece one place has: the weights of its Problem.

    share         piece -> the share of its instances (of a run of blocks), or 1 (of an operator outside of blocks);
                  pieces that the place lacks are absent
    kept          the same times the number of microbatches that are kept at the peak
    free          operators outside of blocks that this place alone has
    length        seconds of a step per second of a microbatch on this place, if all stages take equally long
    limit_bytes   the memory of the place
    """

    share: Mapping[str, float]
    kept: Mapping[str, float]
    free: Mapping[str, int]
    length: float
    limit_bytes: float

    @staticmethod
    def of(found: Found, place: int, program: Program, seen: Sequence[View], alone: Mapping[str, int]) -> PlaceWeights:
        """The weights of place number `place` of `found`. `seen` are the views of its stages; `alone` are the operators
        that only one place has, with that place."""
        table, share, kept = found.table, dict[str, float](), dict[str, float]()
        for view, stage in zip(seen, found.plan.stages, strict=True):
            if stage.place == place:
                for name, part in _parts(view, program):
                    share[name] = share.get(name, 0.0) + part if name in program.runs else 1.0
                    kept[name] = kept.get(name, 0.0) + part * table.flying[view.index].kept
        free = {name: only for name, only in alone.items() if only == place}
        return PlaceWeights(share, kept, free, table.length * table.places, found.ground.limits[place])

    def problem(self, models: Models, level: str, alike: tuple[int, ...], byte_s: float) -> Problem:
        """The Problem of the place, with its blocks run again at `level`. What other places have too is fixed to the
        choices `alike`. With `byte_s` there is no memory limit; instead each byte costs so many seconds of a
        microbatch."""
        micro, once = models.at(level), models.once
        nodes = []
        for index, (cluster, a, b) in enumerate(
            zip(micro.clusters, micro.problem.nodes, once.problem.nodes, strict=True)
        ):
            names = [cluster.scope] if cluster.scope else [op.name for op in cluster.members]
            chosen = None if cluster.scope or any(name in self.free for name in names) else alike[index]
            nodes.append(self._node(names, a, b, chosen))
        nets = [
            self._net(_readers(link), a, self.length) for link, a in zip(micro.links, micro.problem.nets, strict=True)
        ]
        nets += [
            replace(self._net(_readers(link), b, 1.0), memory_bytes=np.zeros_like(b.memory_bytes))
            for link, b in zip(once.links, once.problem.shown().nets, strict=True)
            if b.cost_s.any()
        ]
        found = replace(micro.problem, nodes=tuple(nodes), nets=tuple(nets), memory_limit_bytes=self.limit_bytes)
        return found.paid(self.length * byte_s) if byte_s else found

    def _node(self, names: list[str], micro: Node, once: Node, chosen: int | None) -> Node:
        """A node with the costs and bytes that the place has of it; `chosen` is the only choice allowed (None: all
        are)."""
        share, kept = (max(weights.get(name, 0.0) for name in names) for weights in (self.share, self.kept))
        cost_s = _times(micro.cost_s, self.length * share) + _times(once.cost_s, share)
        if chosen is not None:
            cost_s = np.where(np.arange(len(cost_s)) == chosen, cost_s, np.inf)
        nbytes = held_bytes(micro, kept) * (share > 0) + share * once.memory_bytes
        return replace(
            micro, cost_s=cost_s, memory_bytes=nbytes, hide_s=self.length * share * micro.hide_s, live_bytes=None
        )

    def _net(self, names: list[str], net: Net, length: float) -> Net:
        """A net with the costs and bytes that the place has of it, `length` times per step."""
        share, kept = (max(weights.get(name, 0.0) for name in names) for weights in (self.share, self.kept))
        nbytes = held_bytes(net, 1.0 if net.group >= 0 else kept) * (share > 0)
        return replace(net, cost_s=_times(net.cost_s, length * share), memory_bytes=nbytes, live_bytes=None)


def _parts(view: View, program: Program) -> Iterator[tuple[str, float]]:
    """The pieces that a stage has, each with the share of its instances; weights and inputs that it holds included."""
    for name in (*view.ops, *view.held, *view.inputs):
        yield name, 1.0
    for scope, (first, stop) in view.blocks.items():
        yield scope, (stop - first) / program.runs[scope].count


def _readers(link: Link) -> list[str]:
    """The pieces that read a value. Changes of its layout run where they are."""
    return [op.scope or op.name for op, _ in link.readers]


def _times(cost_s: np.ndarray, times: float) -> np.ndarray:
    """`times` the costs; infinite ones (impossible choices) stay infinite."""
    return np.where(np.isinf(cost_s), np.inf, times * np.where(np.isinf(cost_s), 0.0, cost_s))
