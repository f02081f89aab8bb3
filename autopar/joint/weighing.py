"""The weights of bounds for one timetable (pipeline.makespan_bound), of the shapes that shape_bounds bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.bare_plan import bare_plan
from autopar.cost.comm import collective_s
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable, flow_of
from autopar.pipeline.makespan_bound import Example, Least, least
from autopar.problem.build import Model


@dataclass(frozen=True, eq=False)
class Weighing:
    """The weights of timetables of `shape`. `micro`: the Problem of a microbatch; `slows` as in makespan_bound.mean."""

    context: SearchContext
    shape: Shape
    micro: Model
    slows: float

    def of(self, table: Timetable, examples: Sequence[Example], *, quick: bool) -> Least:
        """The weights that bound the step under `table` best for mixtures of `examples`. `quick` as in
        makespan_bound."""
        flow = flow_of(table.kind, table.places, table.microbatches)
        sends_s = self.sends_s(table)
        return least(flow, table.stages, table.microbatches, examples, sends_s, self.slows, quick=quick)

    def sends_s(self, table: Timetable) -> list[float]:
        """For each stage but the last, the least seconds of a send to the next: over the positions of that cut which
        leave every stage a piece."""
        places, cuts, spare = (
            self.context.grounds(self.shape)[0].places,
            self._crossing_bytes,
            len(self._crossing_bytes) - (table.stages - 1),
        )
        hops = [places.link(one, other) for one, other in pairwise(table.at)]
        took_s = {
            link: [sum(collective_s("send", nbytes, link) for nbytes in sends) for sends in cuts]
            for link in dict.fromkeys(hops)
        }
        return [min(took_s[link][hop : hop + spare + 1]) for hop, link in enumerate(hops)]

    @cached_property
    def _crossing_bytes(self) -> list[list[float]]:
        """For each cut (before each piece but the first), the least bytes that a rank sends of each value: sharded over
        all ranks."""
        micro, shape, context = self.micro, self.shape, self.context
        some = [int(np.isfinite(node.cost_s).argmax()) for node in micro.problem.nodes]
        plan, program = (
            bare_plan(context.whole, context.mesh(shape), micro.decode(some), ""),
            context.planner(shape.microbatches).program,
        )
        return [
            [program.bytes_of(ref) / math.prod(shape.mesh) for ref in sends]
            for sends in context.crossing(plan, shape.microbatches)[1:]
        ]
