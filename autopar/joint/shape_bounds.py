"""Bounds of one shape: first with all the memory there is, then, where what comes of that does not fit, with what there is and at all levels at which blocks
may be run again.

With all the memory there is running again gains nothing: every choice takes at least what it takes without, in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.cost.comm import collective_s
from autopar.errors import InfeasibleError
from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.effort import CLOSEST, Effort
from autopar.joint.pricing import Pricing
from autopar.joint.relaxed import Key, Relaxed
from autopar.joint.relaxed_solving import CLOSE, Solver
from autopar.joint.relaxed_steps import alone, between_pieces, in_one_place, timed
from autopar.joint.remat_bounds import Again, agains
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Models
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable, flow_of
from autopar.joint.wait_cases import bound_s
from autopar.pipeline.makespan_bound import Example, Least, least, mean
from autopar.planner import bare_plan
from autopar.problem.build import Model
from autopar.problem.pass_tables import BACKWARD, INPUTS, PASSES, SHOWN, PassTables
from autopar.problem.remat import rematerialised
from autopar.problem.rerun import keepable
from autopar.problem.step_shares import ForwardPrices
from autopar.recipes.free import space

Choices = list[tuple[int, ...]]


def cut_s(levels: Sequence[Relaxed], cutoff_s: float, effort: Effort, met: Choices, cases: Sequence[Key] = ()) -> float:
    """Seconds that no mixture of `levels` beats; `met` are solutions of all of them, and more of them afterwards. Of one level, where `effort` has cases, by those of the passes
    `cases` (joint.wait_cases)."""
    cutting = Cutting([Level(each, [each.sums(choice) for choice in met]) for each in levels], Solver(levels, exact=effort.cases > 0), met)
    keys = [key for key in cases if key in levels[0].keys] if effort.cases and levels[0].hides else []
    try:
        return bound_s(cutting, keys, cutoff_s, effort) if keys else cutting.bound_s(cutoff_s, effort.rounds)
    except InfeasibleError:
        return math.inf


def _cases_s(relaxed: Relaxed, cutoff_s: float, effort: Effort, met: Choices) -> float:
    """Seconds that nothing of one level beats, by cases of all its passes; nothing is proven by a first look."""
    return cut_s([relaxed], cutoff_s, effort, met, relaxed.keys) if effort.cases else 0.0


@dataclass(frozen=True, eq=False)
class _Kept:
    """Blocks that are run again with any of their results kept: the passes with all kept that can be, what running them again takes at least beside that, and the bytes with nothing
    kept."""

    most: PassTables
    agains: Sequence[Again]
    fewest: Model

    @staticmethod
    def of(plain: Model, fewest: Model, forward: ForwardPrices, passing: Callable[[Model], PassTables]) -> _Kept:
        """Of `plain`, a Problem in which nothing is run again, and the same with nothing kept."""
        program = plain.links[0].program
        all_kept = {scope: [op.name for op in program.ops.values() if op.scope == scope and keepable(op)] for scope in program.runs}
        return _Kept(passing(rematerialised(plain, forward, all_kept)), list(agains(plain, forward)), fewest)

    def levels(self, counted: Callable[[PassTables, Model], Relaxed]) -> Iterator[Relaxed]:
        """A mixture of these is no slower and no larger than any way to run blocks again; `counted` says what passes take, and the memory of a Model."""
        base = counted(self.most, self.fewest)
        for each in self.agains:
            barred_s = [np.where(mask, np.inf, own) for mask, own in zip(each.barred, base.node_s, strict=True)]
            yield replace(base, node_s=barred_s, again=each.corners)


class Alone:
    """One stage and one microbatch. Raises InfeasibleError where some operator has no choice."""

    def __init__(self, context: SearchContext, shape: Shape) -> None:
        self.context, self.whole = context, context.whole
        self.plain = self.whole.model(shape.mesh, space(shape.mesh), str(shape))
        cluster = context.request.cluster
        self.forward = ForwardPrices(cluster.mesh(shape.mesh), cluster.device, context.request.settings, self.whole.forward_kernels)
        self.passing = PassTables(self.plain, self.forward, sums_at_end=False, linked=True)
        self._met: dict[bool, Choices] = {False: [], True: []}  # with all the memory there is, by whether something is on the host: a closer look begins with them

    def roomy_s(self, cutoff_s: float, effort: Effort, *, hosted: bool = False) -> float:
        """Seconds that no plan beats with all the memory there is; `hosted` as bound_s has it."""
        return self._roomy(cutoff_s, effort, hosted=hosted)[0]

    def _roomy(self, cutoff_s: float, effort: Effort, *, hosted: bool) -> tuple[float, Relaxed, Choices]:
        """The same, what it is of, and the solutions that were met."""
        roomy, met = alone(self.passing, self.plain, math.inf, hosted=hosted), self._met[hosted]
        return cut_s([roomy], cutoff_s, effort, met), roomy, met

    def bound_s(self, cutoff_s: float, effort: Effort = CLOSEST, *, hosted: bool = False) -> float:
        """Seconds that no plan beats; `hosted`: none with something on the host, without its update."""
        roomy_s, roomy, met = self._roomy(cutoff_s, effort, hosted=hosted)
        if roomy_s >= cutoff_s:
            return roomy_s
        here = alone(self.passing, self.plain, self.context.limit_bytes, hosted=hosted)
        short = any((here.sums(choice).over > 0).any() for choice in met)
        levels, solutions = list(self._limited(hosted=hosted)) if short else [], Choices()
        limited_s = cut_s(levels, cutoff_s, effort, solutions) if levels else 0.0
        if limited_s <= roomy_s * (1 + CLOSE):  # memory has no price
            return max(roomy_s, _cases_s(roomy, cutoff_s, effort, met))
        return max(limited_s, _cases_s(levels[0], cutoff_s, effort, solutions) if len(levels) == 1 else 0.0)

    def _limited(self, *, hosted: bool) -> Iterator[Relaxed]:
        """The ways to run blocks again: none at all; with any of the results kept that can be kept, which has the bytes and passes of none and of all of them, and what is between
        (joint.remat_bounds). What runs some of the blocks again is a mixture of these, and where there are several, cases are of none of them."""
        asked, free = self.context.request.remat_level, len(self.whole.open_levels) > 1
        if free or asked == "none":
            yield alone(self.passing, self.plain, self.context.limit_bytes, hosted=hosted)
        if asked != "none" and not free:
            here = rematerialised(self.plain, self.forward, self.whole.levels(asked))
            yield alone(PassTables(here, self.forward, sums_at_end=False, linked=True), here, self.context.limit_bytes, hosted=hosted)
        if free:
            yield from self._kept.levels(lambda most, fewest: alone(most, fewest, self.context.limit_bytes, hosted=hosted))

    @cached_property
    def _kept(self) -> _Kept:
        """What running blocks again takes at least."""
        fewest = rematerialised(self.plain, self.forward, self.whole.levels("full"))
        return _Kept.of(self.plain, fewest, self.forward, lambda model: PassTables(model, self.forward, sums_at_end=False, linked=True))


class Timed:
    """Several microbatches on one place or more, each laid out in its own way, under any timetable. Raises InfeasibleError where there is none, or some operator has no choice."""

    def __init__(self, context: SearchContext, pricing: Pricing, shape: Shape) -> None:
        self.context, self.shape = context, shape
        self.tables = pricing.tables(shape)
        if not self.tables:
            raise InfeasibleError(f"no schedule runs {shape.microbatches} microbatches on {shape.places} places")
        self.models: Models = pricing.models(shape)
        self.between = between_pieces(self.models.micro) if shape.places > 1 else None
        self.passing = self._passing(self.models.micro)

    def roomy_s(self, cutoff_s: float, effort: Effort, *, hosted: bool = False) -> float:
        """Seconds that no plan beats with all the memory there is, under any timetable; `hosted` as Alone has it."""
        whole_s = self.whole_s(cutoff_s, effort, hosted=hosted)
        return whole_s if whole_s >= cutoff_s else max(whole_s, cut_s([self.mean(hosted=hosted)], cutoff_s, effort, [], self._cases))

    def bound_s(self, cutoff_s: float, effort: Effort = CLOSEST, *, hosted: bool = False) -> float:
        """Seconds that no plan beats; `hosted` as Alone has it."""
        mean_s, ways, met = self._open(cutoff_s, effort, hosted=hosted)
        mean_s = max(mean_s, self.whole_s(cutoff_s, effort, hosted=hosted) if mean_s < cutoff_s else 0.0)
        if mean_s >= cutoff_s:
            return mean_s
        found = math.inf
        for table, weights in ways:
            found = min(found, self._bound_s(table, weights, min(found, cutoff_s), effort, list(met), hosted=hosted))
        return max(mean_s, found) if ways else mean_s

    def whole_s(self, cutoff_s: float, effort: Effort = CLOSEST, *, hosted: bool = False) -> float:
        """What follows from that places have whole blocks, of n on p places where there is one run of them: either one of them has k + 1, k = n / p rounded up, or
        none has more than k. Then one has k, and the one with the largest operator outside of blocks no less than are left by all others."""
        runs, places, microbatches = self.passing.model.links[0].program.runs, self.shape.places, self.shape.microbatches
        if places == 1 or len(runs) != 1:
            return 0.0
        count = next(iter(runs.values())).count
        most = math.ceil(count / places)
        wanted_s = cutoff_s * count / most
        blocks_s = cut_s([in_one_place(self.passing, self.models, microbatches, 1.0, hosted=hosted)], wanted_s, effort, [], self._cases)
        even_s, uneven_s = blocks_s * most / count, blocks_s * (most + 1) / count
        if even_s >= min(cutoff_s, uneven_s) or self._largest is None:
            return even_s
        least = max(0, count - most * (places - 1))
        there_s = cut_s([in_one_place(self.passing, self.models, microbatches, least / count, self._largest, hosted=hosted)], min(cutoff_s, uneven_s), effort, [], self._cases)
        return min(uneven_s, max(even_s, there_s))

    @cached_property
    def _largest(self) -> int | None:
        """The node outside of blocks that takes longest where each has its best choice; none where there are none."""
        nodes = self.passing.model.problem.nodes
        least_s = {index: float(np.where(np.isinf(nodes[index].cost_s), np.inf, table.each[..., SHOWN].sum(0)).min())
                   for index, table in enumerate(self.passing.nodes) if not table.scope and self.passing.model.clusters[index].root.role == "op"}
        return max(least_s, key=least_s.__getitem__, default=None)

    def _open(self, cutoff_s: float, effort: Effort, *, hosted: bool) -> tuple[float, list[tuple[Timetable, Least]], Choices]:
        """What the mean of all places proves; where that is below `cutoff_s`, the timetables that are to be looked at by themselves; and the solutions that were met."""
        met: Choices = []
        mean_s = cut_s([self.mean(hosted=hosted)], cutoff_s, effort, met, self._cases)
        return mean_s, self._lengths(self._example(met[-1], hosted=hosted)) if mean_s < cutoff_s else [], met

    def _bound_s(self, table: Timetable, weights: Least, cutoff_s: float, effort: Effort, met: Choices, *, hosted: bool) -> float:
        def counted(passing: PassTables, bytes_of: Model, limit_bytes: float = self.context.limit_bytes) -> Relaxed:
            return timed(passing, bytes_of, self.models, table, weights, limit_bytes, hosted=hosted)

        plain = self.models.micro
        roomy_s = cut_s([counted(self.passing, plain, math.inf)], cutoff_s, effort, met, self._cases)
        limited = counted(self.passing, plain)
        if roomy_s >= cutoff_s or not any((limited.sums(choice).over > 0).any() for choice in met):
            return roomy_s
        again = self._kept.levels(counted) if len(self.context.whole.open_levels) > 1 else (counted(passing, passing.model) for passing in self._asked)
        return max(roomy_s, cut_s([limited, *again], cutoff_s, effort, []))

    def mean(self, *, hosted: bool) -> Relaxed:
        """With the mean of all places, whatever the timetable, and all the memory there is; `hosted` as joint.relaxed_steps has it."""
        return timed(self.passing, self.models.micro, self.models, self.tables[0], mean(self.shape.places, self.shape.microbatches), math.inf, hosted=hosted)

    @cached_property
    def _cases(self) -> Sequence[Key]:
        """The passes of which places, each laid out in its own way, are each in one of the cases: what is outside of blocks is not of one place. Where memory has a price
        the mean of all places fits, and not each, so that these are no cases of its own."""
        return [(scope, way) for scope in self.passing.scopes for way in PASSES if scope or self.shape.places == 1]

    @cached_property
    def _kept(self) -> _Kept:
        """What running blocks again takes at least."""
        return _Kept.of(self.models.micro, self.models.at("full"), self.models.forward, self._passing)

    @cached_property
    def _asked(self) -> list[PassTables]:
        """With all blocks run again at the level that is asked for; nothing where that is none."""
        asked = self.context.request.remat_level
        return [self._passing(self.models.at(asked))] if asked != "none" else []

    def _example(self, choice: tuple[int, ...], *, hosted: bool) -> Example:
        """What the passes of a solution take, collectives in the background by what they take of compute, and what comes once."""
        plain = self.mean(hosted=hosted)
        sums, scopes, hides = plain.sums(choice), self.passing.scopes, self.passing.model.prices.contention if plain.hides else 1.0
        forward_s, backward_s = (sum(float(each[SHOWN]) + hides * self.passing.background_s(each) for each in [sums.passes[scope, way] for scope in scopes])
                                 for way in PASSES)
        return Example(forward_s, backward_s, sum(float(sums.passes[scope, BACKWARD][INPUTS]) for scope in scopes), sums.own_s * self.shape.places)

    def _passing(self, model: Model) -> PassTables:
        return PassTables(model, self.models.forward, sums_at_end=True, between=self.between, linked=True)

    @cached_property
    def _crossing_bytes(self) -> list[list[float]]:
        """Of each cut in front of a piece but the first, bytes on a rank of what it sends, at least: each value cut over all ranks."""
        micro, shape, context = self.models.micro, self.shape, self.context
        some = [int(np.isfinite(node.cost_s).argmax()) for node in micro.problem.nodes]
        plan, program = bare_plan(context.whole, context.mesh(shape), micro.decode(some), ""), context.planner(shape.microbatches).program
        return [[program.bytes_of(ref) / math.prod(shape.mesh) for ref in sends] for sends in context.crossing(plan, shape.microbatches)[1:]]

    def _sends_s(self, table: Timetable) -> list[float]:
        """Seconds of a send from each stage to the next, at least: a stage has one piece or more, so that each cut has only some places that it may be in."""
        places, cuts, spare = self.context.grounds(self.shape)[0].places, self._crossing_bytes, len(self._crossing_bytes) - (table.stages - 1)
        hops = [places.link(one, other) for one, other in pairwise(table.at)]
        took_s = {link: [sum(collective_s("send", nbytes, link) for nbytes in sends) for sends in cuts] for link in dict.fromkeys(hops)}
        return [min(took_s[link][hop:hop + spare + 1]) for hop, link in enumerate(hops)]

    def _lengths(self, example: Example) -> list[tuple[Timetable, Least]]:
        """How long each timetable is at least, where it matters: for what takes `example`; the shortest first. Of places that share cores, the mean."""
        alike = self.shape.places == 1 or self.context.request.cluster.device.alone > 1
        found = [(table, mean(table.places, table.microbatches) if alike else
                  least(flow_of(table.kind, table.places, table.microbatches), table.stages, table.microbatches, example, self._sends_s(table))) for table in self.tables]
        return sorted(found, key=lambda way: way[1].step_s(example))
