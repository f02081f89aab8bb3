"""Lower bounds of the seconds of all plans of one shape. Called by joint.prove.

The first bound ignores the memory limit (*roomy*). Running blocks again then gains nothing, as every choice takes at
least as long with it as without, in every pass. Only where the solutions behind that bound do not fit are limits added,
with all levels at which blocks may run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.effort import CLOSEST, Effort
from autopar.joint.pricing import Pricing
from autopar.joint.relaxed import Key, Relaxed
from autopar.joint.relaxed_bounds import Choices, cut_s
from autopar.joint.relaxed_solving import BOUND_TOLERANCE
from autopar.joint.relaxed_steps import alone, between_pieces, in_one_place, timed
from autopar.joint.remat_bounds import Again, agains
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Models
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable
from autopar.joint.weighing import Weighing
from autopar.pipeline.makespan_bound import Example, Least, chain, mean
from autopar.problem.build import Model
from autopar.problem.pass_quantities import INPUTS, SHOWN
from autopar.problem.pass_tables import BACKWARD, PASSES, PassTables
from autopar.problem.remat import rematerialised
from autopar.problem.rerun import keepable
from autopar.problem.step_shares import ForwardPrices
from autopar.recipes.free import space

REWEIGHED = 3
"""How often at most the weights of a timetable are made closer, by the solutions that were met with those before."""


def _cases_s(relaxed: Relaxed, cutoff_s: float, effort: Effort, met: Choices) -> float:
    """A lower bound for one level, by cases of all its passes; 0 if `effort` has no cases."""
    return cut_s([relaxed], cutoff_s, effort, met, relaxed.keys) if effort.cases else 0.0


@dataclass(frozen=True, eq=False)
class _Kept:
    """Bounds for blocks that run again and keep any of their results: the passes if all results are kept that can be
    (`most`), the least cost of running blocks again beyond that (`agains`), and the bytes if nothing is kept
    (`fewest`)."""

    most: PassTables
    agains: Sequence[Again]
    fewest: Model

    @staticmethod
    def of(plain: Model, fewest: Model, forward: ForwardPrices, passing: Callable[[Model], PassTables]) -> _Kept:
        """`plain` is a Problem in which nothing runs again, `fewest` the same with all blocks run again and nothing
        kept."""
        program = plain.links[0].program
        all_kept = {
            scope: [op.name for op in program.ops.values() if op.scope == scope and keepable(op)]
            for scope in program.runs
        }
        return _Kept(passing(rematerialised(plain, forward, all_kept)), list(agains(plain, forward)), fewest)

    def levels(self, counted: Callable[[PassTables, Model], Relaxed]) -> Iterator[Relaxed]:
        """Relaxed steps, of which some mixture is as fast and as small as any way to run blocks again. `counted` makes
        one of passes and the Model that counts bytes."""
        base = counted(self.most, self.fewest)
        for each in self.agains:
            barred_s = [np.where(mask, np.inf, own) for mask, own in zip(each.barred, base.node_s, strict=True)]
            yield replace(base, node_s=barred_s, again=each.corners)


class Alone:
    """Bounds of one stage and one microbatch. Raises InfeasibleError where some operator has no choice."""

    def __init__(self, context: SearchContext, shape: Shape) -> None:
        self.context, self.whole = context, context.whole
        self.plain = self.whole.model(shape.mesh, space(shape.mesh), str(shape))
        cluster = context.request.cluster
        self.forward = ForwardPrices(
            cluster.mesh(shape.mesh), cluster.device, context.request.settings, self.whole.forward_kernels
        )
        self.passing = PassTables(self.plain, self.forward, sums_at_end=False, linked=True)
        # by `hosted`: solutions without memory limit, with which later calls begin
        self._met: dict[bool, Choices] = {False: [], True: []}

    def roomy_s(self, cutoff_s: float, effort: Effort, *, hosted: bool = False) -> float:
        """A lower bound that ignores the memory limit; `hosted` as in bound_s."""
        return self._roomy(cutoff_s, effort, hosted=hosted)[0]

    def _roomy(self, cutoff_s: float, effort: Effort, *, hosted: bool) -> tuple[float, Relaxed, Choices]:
        """`roomy_s`, the relaxed step that it bounds, and the solutions met."""
        roomy, met = alone(self.passing, self.plain, math.inf, hosted=hosted), self._met[hosted]
        return cut_s([roomy], cutoff_s, effort, met), roomy, met

    def bound_s(self, cutoff_s: float, effort: Effort = CLOSEST, *, hosted: bool = False) -> float:
        """A lower bound of the seconds of all plans; with `hosted`, of plans that use host memory, without the update
        there."""
        roomy_s, roomy, met = self._roomy(cutoff_s, effort, hosted=hosted)
        if roomy_s >= cutoff_s:
            return roomy_s
        here = alone(self.passing, self.plain, self.context.limit_bytes, hosted=hosted)
        short = any((here.sums(choice).over > 0).any() for choice in met)
        levels, solutions = list(self._limited(hosted=hosted)) if short else [], Choices()
        limited_s = cut_s(levels, cutoff_s, effort, solutions) if levels else 0.0
        if limited_s <= roomy_s * (1 + BOUND_TOLERANCE):  # the memory limit costs nothing
            return max(roomy_s, _cases_s(roomy, cutoff_s, effort, met))
        return max(limited_s, _cases_s(levels[0], cutoff_s, effort, solutions) if len(levels) == 1 else 0.0)

    def _limited(self, *, hosted: bool) -> Iterator[Relaxed]:
        """Relaxed steps with the memory limit: no block run again; all of them, at the level that was asked for; or, if
        the level is free, all of them with any results kept (`_Kept`). A plan that runs some blocks again is a mixture
        of these. Cases (joint.wait_cases) are only for a single one."""
        asked, free = self.context.request.remat_level, len(self.whole.open_levels) > 1
        if free or asked == "none":
            yield alone(self.passing, self.plain, self.context.limit_bytes, hosted=hosted)
        if asked != "none" and not free:
            here = rematerialised(self.plain, self.forward, self.whole.levels(asked))
            yield alone(
                PassTables(here, self.forward, sums_at_end=False, linked=True),
                here,
                self.context.limit_bytes,
                hosted=hosted,
            )
        if free:
            yield from self._kept.levels(
                lambda most, fewest: alone(most, fewest, self.context.limit_bytes, hosted=hosted)
            )

    @cached_property
    def fewest(self) -> Model:
        """`plain` with all blocks run again and nothing kept."""
        return rematerialised(self.plain, self.forward, self.whole.levels("full"))

    @cached_property
    def _kept(self) -> _Kept:
        """Bounds of running blocks again with any results kept."""
        return _Kept.of(
            self.plain,
            self.fewest,
            self.forward,
            lambda model: PassTables(model, self.forward, sums_at_end=False, linked=True),
        )


class Timed:
    """Bounds of several microbatches on one or more places, or of one on several, which may have layouts of their own,
    under any timetable. Raises InfeasibleError where there is no timetable, or some operator has no choice."""

    def __init__(self, context: SearchContext, pricing: Pricing, shape: Shape) -> None:
        self.context, self.shape = context, shape
        self.tables = pricing.tables(shape, finely=True)
        if not self.tables:
            raise InfeasibleError(f"no schedule runs {shape.microbatches} microbatches on {shape.places} places")
        self.models: Models = pricing.models(shape)
        self._examples: dict[tuple[tuple[int, ...], bool], Example] = {}
        self.in_sums = False  # whether the last backward counts as the sums of gradients beside it
        self.between = between_pieces(self.models.micro) if shape.places > 1 else None
        self.passing = self._passing(self.models.micro)

    def roomy_s(self, cutoff_s: float, effort: Effort, *, hosted: bool = False) -> float:
        """A lower bound over all timetables that ignores the memory limit; `hosted` as in Alone.bound_s."""
        return self._either_s(lambda: self._roomy_s(cutoff_s, effort, hosted=hosted), cutoff_s)

    def bound_s(self, cutoff_s: float, effort: Effort = CLOSEST, *, hosted: bool = False) -> float:
        """A lower bound of the seconds of all plans; `hosted` as in Alone.bound_s."""
        return self._either_s(lambda: self._closest_s(cutoff_s, effort, hosted=hosted), cutoff_s)

    def _either_s(self, least_s: Callable[[], float], cutoff_s: float) -> float:
        """The higher one of two bounds. On one place sums of gradients run beside the last backward, which takes at
        least as long as others, and as the collectives of these sums on any axis."""
        found = 0.0
        for in_sums in (True, False) if self.shape.places == 1 else (False,):
            self.in_sums = in_sums
            found = max(found, least_s()) if found < cutoff_s else found
        return found

    def _roomy_s(self, cutoff_s: float, effort: Effort, *, hosted: bool) -> float:
        """As `roomy_s`, of one of the two bounds of `_either_s`."""
        whole_s = self.whole_s(cutoff_s, effort, hosted=hosted)
        return (
            whole_s
            if whole_s >= cutoff_s
            else max(whole_s, cut_s([self.mean(hosted=hosted)], cutoff_s, effort, [], self._cases))
        )

    def _closest_s(self, cutoff_s: float, effort: Effort, *, hosted: bool) -> float:
        """As `bound_s`, of one of the two bounds of `_either_s`."""
        mean_s, ways, met = self._open(cutoff_s, effort, hosted=hosted)
        quick = not effort.cases
        mean_s = max(mean_s, self.whole_s(cutoff_s, effort, hosted=hosted) if mean_s < cutoff_s else 0.0)
        if mean_s >= cutoff_s:
            return mean_s
        found = math.inf
        for table, weights in ways:
            below_s, seen = min(found, cutoff_s), list(met)
            least_s = self._bound_s(table, weights, below_s, effort, seen, hosted=hosted)
            for _ in range(REWEIGHED):
                examples = [self._example(choice, hosted=hosted) for choice in seen]
                if least_s >= min([below_s, *((1 - BOUND_TOLERANCE) * weights.step_s(each) for each in examples)]):
                    break
                before, weights = weights, self.weights(table, examples, quick=quick)
                if weights == before:
                    break
                least_s = max(least_s, self._bound_s(table, weights, below_s, effort, seen, hosted=hosted))
            found = min(found, least_s)
        return max(mean_s, found) if ways else mean_s

    def whole_s(self, cutoff_s: float, effort: Effort = CLOSEST, *, hosted: bool = False) -> float:
        """A lower bound from blocks being indivisible, for a model with one run of n blocks on p > 1 places; 0 for
        others.

        With k = n / p rounded up, either some place has k + 1 blocks or more, or none has more than k. In the second
        case some place has k, and the place with the largest operator outside of blocks has at least n - k (p - 1).
        """
        runs, places, microbatches = (
            self.passing.model.links[0].program.runs,
            self.shape.places,
            self.shape.microbatches,
        )
        if places == 1 or len(runs) != 1:
            return 0.0
        count = next(iter(runs.values())).count
        most = math.ceil(count / places)
        wanted_s = cutoff_s * count / most
        blocks_s = cut_s(
            [in_one_place(self.passing, self.models, microbatches, 1.0, hosted=hosted)],
            wanted_s,
            effort,
            [],
            self._cases,
        )
        even_s, uneven_s = blocks_s * most / count, blocks_s * (most + 1) / count
        if even_s >= min(cutoff_s, uneven_s):
            return even_s
        share = max(0, count - most * (places - 1)) / count
        there = in_one_place(self.passing, self.models, microbatches, share, beside_s=self._largest_s, hosted=hosted)
        there_s = cut_s([there], min(cutoff_s, uneven_s), effort, [], self._cases)
        return min(uneven_s, max(even_s, there_s))

    @cached_property
    def _largest_s(self) -> float:
        """The most seconds that a single operator outside of blocks takes per microbatch, at its fastest choice; 0
        where there is none. Operators that share a choice may be on different places."""
        model, apart = self.passing.model, {unit.name for unit in self.context.units if unit.instance < 0}
        return max(
            (
                float(np.where(np.isinf(node.cost_s), np.inf, member.each(model.prices.op_s)).min())
                for node, members in zip(model.problem.nodes, model.members, strict=True)
                for member in members
                if member.op.name in apart and not member.op.free
            ),
            default=0.0,
        )

    def _open(
        self, cutoff_s: float, effort: Effort, *, hosted: bool
    ) -> tuple[float, list[tuple[Timetable, Least]], Choices]:
        """The bound by the mean over places; the timetables to bound one by one (none if the mean reaches `cutoff_s`);
        and the solutions met."""
        met: Choices = []
        mean_s = cut_s([self.mean(hosted=hosted)], cutoff_s, effort, met, self._cases)
        if mean_s >= cutoff_s:
            return mean_s, [], met
        example = self._example(met[-1], hosted=hosted)
        ways = [(table, self.weights(table, [example], quick=not effort.cases)) for table in self.tables]
        return mean_s, sorted(ways, key=lambda way: way[1].step_s(example)), met

    def _bound_s(
        self, table: Timetable, weights: Least, cutoff_s: float, effort: Effort, met: Choices, *, hosted: bool
    ) -> float:
        """A lower bound of the plans under one timetable, whose length is bounded by `weights`. The memory limit is
        added only where the solutions without it do not fit."""

        def counted(passing: PassTables, bytes_of: Model, limit_bytes: float = self.context.limit_bytes) -> Relaxed:
            return timed(passing, bytes_of, self.models, table, weights, limit_bytes, hosted=hosted)

        plain = self.models.micro
        roomy_s = cut_s([counted(self.passing, plain, math.inf)], cutoff_s, effort, met, self._cases)
        limited = counted(self.passing, plain)
        if roomy_s >= cutoff_s or not any((limited.sums(choice).over > 0).any() for choice in met):
            return roomy_s
        again = (
            self._kept.levels(counted)
            if len(self.context.whole.open_levels) > 1
            else (counted(passing, passing.model) for passing in self._asked)
        )
        return max(roomy_s, cut_s([limited, *again], cutoff_s, effort, []))

    def mean(self, *, hosted: bool) -> Relaxed:
        """The relaxed step whose seconds are the mean of the work of all places, or all of it where they run one after
        the other. It holds for any timetable, without memory limit."""
        return self._weighed(self._plain, hosted=hosted)

    def _weighed(self, weights: Least, *, hosted: bool) -> Relaxed:
        """The relaxed step with these weights for any timetable, without memory limit."""
        micro = self.models.micro
        return timed(self.passing, micro, self.models, self.tables[0], weights, math.inf, hosted=hosted)

    @cached_property
    def weighing(self) -> Weighing:
        """The weights of bounds for one timetable."""
        return Weighing(self.context, self.shape, self.models.micro, self._slows)

    def weights(self, table: Timetable, examples: Sequence[Example], *, quick: bool) -> Least:
        """The weights of the best bound for mixtures of `examples`: under `table`, or on one place, or where places
        share cores, for any timetable. `quick` as in makespan_bound."""
        alike = self.shape.places == 1 or self.context.request.cluster.device.alone > 1
        return self._plain if alike else self.weighing.of(table, examples, quick=quick)

    @property
    def _plain(self) -> Least:
        """The weights of a bound for any timetable."""
        if self.shape.naive:
            return chain(self.shape.places, self.context.request.cluster.device.alone)
        found = mean(self.shape.places, self.shape.microbatches, self._slows)
        if not self.in_sums:
            return found
        axes = sum(size > 1 for size in self.shape.mesh)
        return replace(found, backward=found.backward - 1.0, beside=1.0 / max(1, axes))

    @cached_property
    def _cases(self) -> Sequence[Key]:
        """The passes that can be divided into cases of waiting (joint.wait_cases). On several places only those of
        blocks, as what is outside of blocks is not on one place. Not used with a memory limit on several places, which
        holds for their mean and not for each of them."""
        return [(scope, way) for scope in self.passing.scopes for way in PASSES if scope or self.shape.places == 1]

    @cached_property
    def _kept(self) -> _Kept:
        """Bounds of running blocks again with any results kept."""
        return _Kept.of(self.models.micro, self.models.at("full"), self.models.forward, self._passing)

    @cached_property
    def _asked(self) -> list[PassTables]:
        """The passes with all blocks run again at the level that was asked for; empty if that is none."""
        asked = self.context.request.remat_level
        return [self._passing(self.models.at(asked))] if asked != "none" else []

    def _example(self, choice: tuple[int, ...], *, hosted: bool) -> Example:
        """The passes of a solution, as an example for pipeline.makespan_bound, made once."""
        if (choice, hosted) not in self._examples:
            self._examples[choice, hosted] = self._example_of(choice, hosted=hosted)
        return self._examples[choice, hosted]

    def _example_of(self, choice: tuple[int, ...], *, hosted: bool) -> Example:
        """`_example`: background collectives count by the compute that they slow down."""
        plain = self._weighed(mean(self.shape.places, self.shape.microbatches), hosted=hosted)  # all but sums
        sums, scopes = plain.sums(choice), self.passing.scopes
        hides = self.passing.model.prices.contention if plain.hides else 1.0
        forward_s, backward_s = (
            sum(
                float(each[SHOWN]) + hides * self.passing.background_s(each)
                for each in [plain.pass_of(sums, (scope, way)) for scope in scopes]
            )
            for way in PASSES
        )
        return Example(
            forward_s,
            backward_s,
            sum(float(plain.pass_of(sums, (scope, BACKWARD))[INPUTS]) for scope in scopes),
            sums.own_s * self.shape.places,
            self._weighed(Least(0.0, 0.0, 0.0, 0.0, beside=1.0), hosted=hosted).sums(choice).own_s,
        )

    @property
    def _slows(self) -> float:
        """`slows` of makespan_bound.mean; on one place work may wait for other collectives meanwhile."""
        return self.passing.model.prices.contention if self.shape.places > 1 else 0.0

    def _passing(self, model: Model) -> PassTables:
        """The quantities of passes for the Problem `model` of a microbatch."""
        return PassTables(model, self.models.forward, sums_at_end=True, between=self.between, linked=True)
