"""Lower bounds of the seconds of all plans of one shape by how its pieces, and with them its memory, can be divided, in
little time. Called by joint.prove.

Each run of blocks, and each operator outside of blocks, is bounded alone (pipeline.memory_bound): its least seconds, at
the first prices of a relaxed step (joint.price_polytope), at which more compute hides nothing, so that what running
blocks again takes comes on top, and at closer ones; the fewest bytes that it keeps; and what its blocks keep that run
again, each operator at the best rate of the device and each result divided over all ranks (joint.remat_bounds). What
operators outside of blocks take beyond that, and their bytes, may be on any place: how these are divided says nothing
of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.joint.effort import Effort
from autopar.joint.relaxed_bounds import chain_s, cut_s
from autopar.joint.relaxed_solving import BOUND_TOLERANCE
from autopar.joint.relaxed_steps import alone, kept_bytes, of_scope, rests_bytes
from autopar.joint.remat_bounds import Corner, Hulls, algorithms
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Alone, Timed
from autopar.joint.timetables import Kind, Timetable, flow_of, timetable
from autopar.pipeline.memory_bound import Part, Step, Whole, where
from autopar.pipeline.units import Unit, homes
from autopar.problem.build import Model
from autopar.problem.pass_quantities import INPUTS, SHOWN
from autopar.problem.pass_tables import BACKWARD, PASSES
from autopar.problem.time_floor import least_s

CLOSER = Effort(4)
"""Rounds of cutting planes for the passes of blocks: more hardly raise a bound."""


@dataclass(frozen=True, eq=False)
class Room:
    """The bounds for the memory of `context`, on all of its shapes."""

    context: SearchContext
    _hulls: dict[frozenset[str], Mapping[str, Sequence[Corner]]] = field(default_factory=dict)
    _known: dict[tuple[Alone | Timed, bool], float] = field(default_factory=dict)

    def bound_s(self, here: Alone | Timed, *, hosted: bool) -> float:
        """A lower bound in seconds; 0 where nothing is known: if all blocks run again by request, or places are faster
        while others wait. `hosted` as in Alone.bound_s."""
        request = self.context.request
        if request.cluster.device.alone > 1 or not (self._free or request.remat_level == "none"):
            return 0.0
        if (here, hosted) not in self._known:
            self._known[here, hosted] = (
                self._alone_s(here, hosted=hosted) if isinstance(here, Alone) else self._timed_s(here, hosted=hosted)
            )
        return self._known[here, hosted]

    @property
    def _free(self) -> bool:
        """Whether blocks may run again or not."""
        return len(self.context.whole.open_levels) > 1

    def _alone_s(self, here: Alone, *, hosted: bool) -> float:
        """The bound of one stage and one microbatch."""
        table = timetable(Kind("1f1b"), 1, 1)
        whole_s = cut_s([alone(here.passing, here.plain, math.inf, hosted=hosted)], math.inf, Effort(0), [])
        fewest = here.fewest if self._free else None
        ways = self._ways(here.plain, fewest, frozenset(), 1, math.prod(here.forward.sizes), hosted=hosted)
        parts = [Part(0.0, 0.0, 0.0, whole_s, 0.0, ((0.0, 0.0),))]
        parts += [Part(0.0, 0.0, 0.0, 0.0, 0.0, own) for own in ways.values()]
        return self._step(table).least_s(parts)

    def _timed_s(self, here: Timed, *, hosted: bool) -> float:
        """The bound of several microbatches, under any timetable: those first that are likely to be the shortest."""
        parts, found = list(self._parts_of(here, hosted=hosted)), math.inf
        for table in sorted(here.tables, key=lambda table: (not table.schedule.splits_backward, -table.stages)):
            step = self._step(table, here.weighing.sends_s(table))
            least_s = step.least_s(parts)
            if least_s < found:
                found = min(found, max(least_s, _whole_s(parts, step, least_s)))
        return found

    def _step(self, table: Timetable, sends_s: Sequence[float] = ()) -> Step:
        """A step under `table`."""
        flow = flow_of(table.kind, table.places, table.microbatches)
        return Step(table.at, table.microbatches, table.in_flight, self.context.limit_bytes, flow, sends_s)

    def _parts_of(self, here: Timed, *, hosted: bool) -> Iterator[Part]:
        """The parts of a microbatch: runs of blocks, operators outside of blocks, and the rest of each quantity, of
        which nothing is known where it is."""
        passing, models, m = here.passing, here.models, here.shape.microbatches
        ranks, fewest = math.prod(here.shape.mesh), models.at("full") if self._free else None
        ways = self._ways(models.micro, fewest, here.between or frozenset(), m, ranks, hosted=hosted)
        pieces = list(_pieces(here, self.context.units, hosted=hosted))
        for scope, own in ways.items():
            inputs_s = sum(
                float(table.each[BACKWARD, np.isfinite(node.cost_s), INPUTS].min())
                for table, node in zip(passing.nodes, models.micro.problem.nodes, strict=True)
                if table.scope == scope
            )
            forward_s, backward_s, step_s = _passes_s(here, scope, Effort(0), hosted=hosted)
            rest_bytes = rests_bytes(models.once, scope, hosted=hosted)
            if scope:
                closer_s, *roomy_s = _passes_s(here, scope, CLOSER, hosted=hosted)
                first = next(number for number, unit in enumerate(self.context.units) if unit.name == scope)
                yield Part(
                    max(forward_s, closer_s),
                    backward_s,
                    inputs_s,
                    step_s,
                    rest_bytes,
                    own,
                    (roomy_s[0], roomy_s[1]),
                    first,
                    models.micro.links[0].program.runs[scope].count,
                    _chain_s(here, scope, hosted=hosted) if passing.carried else (),
                )
                continue
            yield Part(max(0.0, forward_s - sum(part.forward_s for part in pieces)), 0.0, 0.0, 0.0)
            yield Part(0.0, max(0.0, backward_s - sum(part.backward_s for part in pieces)), 0.0, 0.0)
            yield Part(0.0, 0.0, 0.0, max(0.0, step_s - sum(part.step_s for part in pieces)))
            yield Part(0.0, 0.0, 0.0, 0.0, rest_bytes)
            yield Part(0.0, 0.0, 0.0, 0.0, 0.0, own)
        yield from pieces

    def _ways(
        self,
        plain: Model,
        fewest: Model | None,
        between: frozenset[int],
        microbatches: int,
        ranks: int,
        *,
        hosted: bool,
    ) -> dict[str, list[Corner]]:
        """By scope, the (seconds, bytes) of a microbatch that is kept with nothing run again (`plain`), and with blocks
        run again that keep any results beside those of `fewest`, in which they keep none."""
        found = {}
        for scope in ("", *plain.links[0].program.runs):
            found[scope] = [(0.0, kept_bytes(plain, plain.shared, scope, between, hosted=hosted))]
            if scope and fewest is not None:
                least_bytes = kept_bytes(fewest, plain.shared, scope, between, hosted=hosted)
                found[scope] += [
                    (seconds / ranks / microbatches, least_bytes + nbytes / ranks / microbatches)
                    for seconds, nbytes in self._hull(frozenset(algorithms(plain)))[scope]
                ]
        return found

    def _hull(self, free: frozenset[str]) -> Mapping[str, Sequence[Corner]]:
        """The corners of the whole batch on one device, by scope. Keeping the results of operators in `free` takes no
        bytes."""
        if free not in self._hulls:
            whole, request = self.context.whole, self.context.request
            device, settings = request.cluster.device, request.settings
            hulls = Hulls(whole.program, whole.clusters, lambda op: least_s(op, 0, device, settings))
            self._hulls[free] = hulls.corners(free)
        return self._hulls[free]


def _pieces(here: Timed, pieces: Sequence[Unit], *, hosted: bool) -> Iterator[Part]:
    """Of the `pieces` of the model the operators outside of blocks, each at its fastest choice. Operators that share a
    choice with others are on different places, so that only what is of one piece counts."""
    micro, once, m = here.models.micro, here.models.once, here.shape.microbatches
    home = homes(micro.links[0].program, pieces)
    seconds = {unit.name: np.zeros(4) for unit in pieces if unit.instance < 0}
    for index, (cluster, table, node) in enumerate(
        zip(micro.clusters, here.passing.nodes, micro.problem.nodes, strict=True)
    ):
        at, *others = {home[op.name] for op in cluster.members}
        if others or at not in seconds:
            continue
        able = np.isfinite(node.cost_s)
        forward_s, backward_s = (table.each[way, able, SHOWN] for way in PASSES)
        once_s = once.updates_s[index][able] * (not hosted)
        inputs_s = table.each[BACKWARD, able, INPUTS]
        all_s = m * (forward_s + backward_s) + once_s
        seconds[at] += [float(each.min()) for each in (forward_s, backward_s, inputs_s, all_s)]
    for number, unit in enumerate(pieces):
        if unit.instance < 0:
            forward_s, backward_s, inputs_s, all_s = seconds[unit.name].tolist()
            yield Part(forward_s, backward_s, inputs_s, all_s, first=number, count=1)


def _passes_s(here: Timed, scope: str, effort: Effort, *, hosted: bool) -> list[float]:
    """Lower bounds of the seconds of the forward and of the backward of a scope, and of all microbatches and once per
    step."""
    return [
        cut_s([of_scope(here.passing, here.models, scope, times, sums=times[2], hosted=hosted)], math.inf, effort, [])
        for times in _times(here.shape.microbatches)
    ]


def _chain_s(here: Timed, scope: str, *, hosted: bool) -> list[tuple[float, float]]:
    """As `_passes_s`, with what the blocks of the scope leave to each other (Part.chain_s)."""
    return [
        chain_s(of_scope(here.passing, here.models, scope, times, sums=times[2], hosted=hosted), CLOSER)
        for times in _times(here.shape.microbatches)
    ]


def _times(microbatches: int) -> Sequence[tuple[float, float, float]]:
    """How often the forward of a scope, its backward and what happens once per step count in each of its bounds."""
    return (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (float(microbatches), float(microbatches), 1.0)


def _whole_s(parts: Sequence[Part], step: Step, least_s: float) -> float:
    """The bound from pieces being indivisible, for a model with one run of n blocks on several places; 0 for others,
    and where it is no more than `least_s`.

    With k = n / places rounded up, either some place has k + 1 blocks or more, or none has more than k, and the largest
    operator outside of blocks is in some stage.
    """
    places, stages = len(step.flying), len(step.at)
    runs = [number for number, part in enumerate(parts) if part.count > 1]
    singles = [number for number, part in enumerate(parts) if part.count == 1]
    if places == 1 or len(runs) != 1 or not singles:
        return 0.0
    blocks, largest = parts[runs[0]], max(singles, key=lambda number: parts[number].step_s)
    most = math.ceil(blocks.count / places)
    work_s = blocks.forward_s + max(blocks.backward_s, blocks.roomy_s[0])  # other work may overlap sums of gradients
    found = step.microbatches * work_s * (most + 1) / blocks.count
    for stage in reversed(where(parts[largest], parts, stages)):
        if found <= least_s * (1 + BOUND_TOLERANCE):
            return 0.0
        found = min(found, step.least_s(parts, Whole(runs[0], most, largest, stage)))
    return found
