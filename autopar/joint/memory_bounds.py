"""Lower bounds of the seconds of all plans of one shape by what its memory leaves room for, in little time. Called by
joint.prove.

Each run of blocks, and all that is outside of blocks, is bounded alone (pipeline.memory_bound): its least seconds, at
the first prices of a relaxed step (joint.price_polytope), at which more compute hides nothing, so that what running
blocks again takes comes on top; the fewest bytes that it keeps; and what its blocks keep that run again, each operator
at the best rate of the device and each result divided over all ranks (joint.remat_bounds).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.joint.effort import Effort
from autopar.joint.relaxed import Relaxed
from autopar.joint.relaxed_steps import alone, kept_bytes, of_scope, rests_bytes
from autopar.joint.remat_bounds import Corner, Hulls, algorithms
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Alone, Timed, cut_s
from autopar.joint.timetables import Kind, Timetable, flow_of, timetable
from autopar.pipeline import memory_bound
from autopar.pipeline.memory_bound import Part
from autopar.problem.build import Model
from autopar.problem.pass_quantities import INPUTS
from autopar.problem.pass_tables import BACKWARD
from autopar.problem.time_floor import least_s


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
        whole_s = _first_s(alone(here.passing, here.plain, math.inf, hosted=hosted))
        fewest = here.fewest if self._free else None
        ways = self._ways(here.plain, fewest, frozenset(), 1, math.prod(here.forward.sizes), hosted=hosted)
        parts = [Part(0.0, 0.0, 0.0, whole_s, 0.0, ((0.0, 0.0),))]
        parts += [Part(0.0, 0.0, 0.0, 0.0, 0.0, own) for own in ways.values()]
        return self._step_s(parts, table)

    def _timed_s(self, here: Timed, *, hosted: bool) -> float:
        """The bound of several microbatches, under any timetable."""
        parts = list(self._parts_of(here, hosted=hosted))
        return min(self._step_s(parts, table, here.sends_s(table)) for table in here.tables)

    def _step_s(self, parts: Sequence[Part], table: Timetable, sends_s: Sequence[float] = ()) -> float:
        """pipeline.memory_bound.step_s under `table`."""
        flow, limit_bytes = flow_of(table.kind, table.places, table.microbatches), self.context.limit_bytes
        return memory_bound.step_s(parts, table.at, table.microbatches, table.in_flight, limit_bytes, flow, sends_s)

    def _parts_of(self, here: Timed, *, hosted: bool) -> Iterator[Part]:
        """The parts of a microbatch."""
        passing, models, m = here.passing, here.models, here.shape.microbatches
        ranks, fewest = math.prod(here.shape.mesh), models.at("full") if self._free else None
        ways = self._ways(models.micro, fewest, here.between or frozenset(), m, ranks, hosted=hosted)
        for scope, own in ways.items():
            forward_s, backward_s, step_s = (
                _first_s(of_scope(passing, models, scope, times, hosted=hosted))
                for times in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (float(m), float(m), 1.0))
            )
            inputs_s = sum(
                float(table.each[BACKWARD, np.isfinite(node.cost_s), INPUTS].min())
                for table, node in zip(passing.nodes, models.micro.problem.nodes, strict=True)
                if table.scope == scope
            )
            yield Part(forward_s, backward_s, inputs_s, step_s, rests_bytes(models.once, scope, hosted=hosted), own)

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


def _first_s(relaxed: Relaxed) -> float:
    """A lower bound of the seconds of a relaxed step at its first prices."""
    return cut_s([relaxed], math.inf, Effort(0), [])
