"""What a place does in one microbatch: for one shape and one role per mesh axis, the Problems of a microbatch and of what a step
costs once, solved for the share of a timetable."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.cluster import Cluster, Mesh
from autopar.errors import PlanError
from autopar.joint.floor import Work
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable
from autopar.pipeline.microbatches import Microbatching
from autopar.pipeline.sharing import sharing
from autopar.pipeline.units import units
from autopar.planner import Planner, Request
from autopar.problem.build import Model, build
from autopar.problem.prices import Prices
from autopar.problem.remat import Levels, levels, rematerialised
from autopar.problem.shares import ForwardPrices, MicroPrices, Share, StepPrices, combined
from autopar.problem.types import Solution
from autopar.recipes.roles import Role
from autopar.search import ilp

SOLVE_S = 2.0  # seconds for one Problem


@dataclass(frozen=True, eq=False)
class Models:
    """The Problems of one microbatch and of what a step costs once, with the same choices; the prices of the forward; the blocks that
    are run again in the backward, as `Plan.remat` says it."""

    micro: Model
    once: Model
    forward: ForwardPrices
    remat: Levels


class Inner:
    """All Problems of one graph, made when first asked for. `whole` reads the graph at the sizes of the batch; `limit_bytes` is
    the memory that a plan may fill on each device."""

    def __init__(self, gm: fx.GraphModule, hints: Mapping[str, int], request: Request) -> None:
        self.gm, self.hints, self.request = gm, dict(hints), request
        self.whole = Planner.of(gm, hints, request)
        self._planners: dict[int, Planner] = {1: self.whole}
        self._models: dict[tuple[Shape, tuple[Role, ...]], Models] = {}
        self._shared: dict[int, Microbatching] = {}
        self.limit_bytes = request.limit_bytes

    def limited(self, limit_bytes: float) -> Inner:
        """The same with that much memory on each device; what was made so far is shared."""
        other = copy.copy(self)
        other.limit_bytes = limit_bytes
        return other

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.hints.get("b", 1)

    @cached_property
    def pieces(self) -> int:
        """Into how many pieces the model can be cut."""
        return len(units(self.whole.program))

    @cached_property
    def work(self) -> Work:
        """The least work of a step."""
        return Work.of(self.whole.program, self.request.cluster.device, training=self.request.settings.training)

    def planner(self, microbatches: int) -> Planner:
        """The program at the sizes of one microbatch."""
        if microbatches not in self._planners:
            self._planners[microbatches] = Planner.of(self.gm, {**self.hints, "b": self.batch // microbatches}, self.request)
        return self._planners[microbatches]

    def line(self, shape: Shape) -> Mesh:
        """The pipeline axis."""
        return Mesh(self._cluster_mesh(shape).axes[:1])

    def mesh(self, shape: Shape) -> Mesh:
        """The mesh of a place."""
        axes = self._cluster_mesh(shape).axes
        return Mesh(axes[1:]) if shape.places > 1 else Mesh(axes)

    def _cluster_mesh(self, shape: Shape) -> Mesh:
        return self.request.cluster.mesh((shape.places, *shape.mesh) if shape.places > 1 else shape.mesh)

    def models(self, shape: Shape, used: tuple[Role, ...]) -> Models:
        """Raises InfeasibleError where sizes and roles leave some operator without a choice."""
        key = (shape, used)
        if key not in self._models:
            here, mesh, request = self.planner(shape.microbatches), self.mesh(shape), self.request
            joints = [here.joints(role, n) for role, n in zip(used, shape.mesh, strict=True)]
            micro, once = (build(here.program, here.clusters, joints, kind(mesh, request.cluster.device, request.settings),
                                 self.limit_bytes, str(shape)) for kind in (MicroPrices, StepPrices))
            forward = ForwardPrices(mesh, request.cluster.device, request.settings)
            remat = levels(here.program, request.remat_level)
            self._models[key] = Models(rematerialised(micro, forward, remat), once, forward, remat)
        return self._models[key]

    def solve(self, models: Models, table: Timetable, *, exact: bool, cutoff_s: float = math.inf,
              start: Sequence[int] | None = None) -> tuple[Model, Solution]:
        """A place's choices under `table`, at a glance or `exact`. Raises InfeasibleError where memory is short."""
        share = Share(table.length, 1 / table.places, table.kept, 1 / table.places)
        model = combined(models.micro, models.once, share, self.limit_bytes)
        if exact:
            return model, ilp.search(model.problem, time_limit_s=SOLVE_S, seed=self.request.seed, cutoff_s=cutoff_s, gap=0.005,
                                     start=None if start is None else tuple(start))
        return model, ilp.glance(model.problem, time_limit_s=SOLVE_S)

    @cached_property
    def rest_bytes(self) -> float:
        """Bytes of all that rests, on one device."""
        cluster = self.request.cluster
        one = Cluster("one", cluster.levels[-1:], cluster.device)
        prices = Prices(Mesh(tuple(a for a in one.mesh((one.devices,)).axes)), cluster.device, self.request.settings)
        return sum(prices.rest_bytes(op, self.whole.table(1, placed=False)[op.name][:1]) for op in self.whole.program.ops.values() if op.role == "param")

    def shared(self, microbatches: int) -> Microbatching | None:
        """How so many microbatches share values; None for one.

        Raises PlanError, naming the operator, where they cannot.
        """
        if microbatches == 1:
            return None
        if microbatches not in self._shared:
            self._shared[microbatches] = sharing(self.whole.program, self.whole.clusters, self.whole.table(microbatches, placed=False),
                                                 microbatches, self.request.cluster, self.request.settings)
        return self._shared[microbatches]

    @cached_property
    def sharable(self) -> str:
        """Why the batch cannot be cut into microbatches; empty where it can."""
        if self.batch < 2:
            return "a batch of one sample has no microbatches"
        try:
            self.shared(next(n for n in range(2, self.batch + 1) if self.batch % n == 0))
        except PlanError as error:
            return str(error)
        return ""
