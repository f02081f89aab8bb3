"""What a place does in one microbatch: for one shape and one role per mesh axis, the Problems of a microbatch and of what a step
costs once, solved for the share of a timetable."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.joint.floor import Work
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable
from autopar.pipeline.balance import Cost
from autopar.pipeline.costs import costs
from autopar.pipeline.crossing import crossing
from autopar.pipeline.microbatches import Microbatching
from autopar.pipeline.sharing import sharing
from autopar.pipeline.units import Unit, units
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.build import Frame, Model
from autopar.problem.graph import Ref
from autopar.problem.least import least_bytes
from autopar.problem.prices import Prices
from autopar.problem.remat import Levels, levels, rematerialised
from autopar.problem.shares import ForwardPrices, MicroPrices, Share, StepPrices, combined
from autopar.problem.types import Solution
from autopar.recipes import roles
from autopar.recipes.roles import Role
from autopar.request import Request
from autopar.search import ilp

SOLVE_S = 2.0  # seconds for one Problem
SOLVED = 0.005  # relative: so near the optimum is solved


@dataclass(eq=False)
class Models:
    """The Problems of one microbatch and of what a step costs once, with the same choices, and the prices of the forward."""

    micro: Model
    once: Model
    forward: ForwardPrices
    _again: dict[str, Model] = field(default_factory=dict)

    def at(self, level: str) -> Model:
        """`micro` with all blocks run again in the backward at one of problem.remat.LEVELS."""
        if level not in self._again:
            self._again[level] = rematerialised(self.micro, self.forward, levels(self.micro.links[0].program, level))
        return self._again[level]


@dataclass(eq=False)
class Chosen:
    """What a place does: `solution` of `model`, all blocks run again at `level`.

    `apart` as pipeline.costs has it. `all_again`: the level was asked for, so that every block is run again, not only those that
    memory wants.
    """

    models: Models
    model: Model
    solution: Solution
    level: str
    apart: bool
    all_again: bool

    @cached_property
    def pieces(self) -> Sequence[Cost]:
        """What it costs piece by piece, nothing run again."""
        return self._costs(self.models.micro)

    @cached_property
    def again(self) -> Sequence[Cost]:
        """The same with all blocks run again."""
        micro = self.models.at(self.level)
        return self.pieces if micro is self.models.micro else self._costs(micro)

    def _costs(self, micro: Model) -> list[Cost]:
        return costs(micro.links[0].program, micro, self.models.once, self.solution.choice, self.models.forward, apart=self.apart)


class Inner:
    """All Problems of one graph, made when first asked for. `whole` reads the graph at the sizes of the batch; `limit_bytes` is
    the memory that a plan may fill on each device."""

    def __init__(self, gm: fx.GraphModule, hints: Mapping[str, int], request: Request) -> None:
        self.gm, self.hints, self.request = gm, dict(hints), request
        self.whole = Planner.of(gm, hints, request)
        self._planners: dict[int, Planner] = {1: self.whole}
        self._models: dict[tuple[Shape, tuple[Role, ...]], Models] = {}
        self._shared: dict[int, Microbatching] = {}
        self._held: dict[str, float] = {}
        self._crossing: dict[tuple[str, ...], list[tuple[Ref, ...]]] = {}
        self._levels: dict[str, Levels] = {}
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
    def units(self) -> list[Unit]:
        """The pieces that the model can be cut into."""
        return units(self.whole.program)

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return len(self.units)

    @cached_property
    def work(self) -> Work:
        """The least work of a step."""
        return Work.of(self.whole.program, self.request.cluster.device, self.request.settings)

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
            frame = Frame.of(here.program, here.clusters, joints, shape.mesh)
            device, settings = request.cluster.device, request.settings
            micro, once = (frame.priced(kind(mesh, device, settings, here.kernels), self.limit_bytes, str(shape)) for kind in (MicroPrices, StepPrices))
            self._models[key] = Models(micro, once, ForwardPrices(mesh, device, settings, here.forward_kernels))
        return self._models[key]

    def solve(self, models: Models, table: Timetable, level: str, *, exact: bool, cutoff_s: float = math.inf) -> Chosen:
        """A place's choices under `table`, with all blocks run again at `level`, at a glance (which ends where nothing is as fast as
        `cutoff_s`) or `exact`. Raises InfeasibleError where memory is short."""
        share = Share(table.length, 1 / table.places, table.kept, 1 / table.places)
        model = combined(models.at(level), models.once, share, self.limit_bytes)
        solution = (ilp.search(model.problem, time_limit_s=SOLVE_S, seed=self.request.seed, gap=SOLVED) if exact else
                    ilp.glance(model.problem, time_limit_s=SOLVE_S, cutoff_s=cutoff_s))
        return Chosen(models, model, solution, level, table.places > 1, self.request.remat != "auto")

    def levels(self, level: str) -> Levels:
        """What all blocks keep at one of problem.remat.LEVELS, found once."""
        if level not in self._levels:
            self._levels[level] = levels(self.whole.program, level)
        return self._levels[level]

    def held_bytes(self, shape: Shape, level: str) -> float:
        """Bytes of each device if all that is held were cut evenly over all of them, each place with one microbatch at least."""
        if level not in self._held:
            self._held[level] = least_bytes(self.whole.program, self.whole.clusters, self.whole.joints(roles.nothing, 1), self.request.cluster,
                                            self.request.settings, self.levels(level))
        rest = self.rest_bytes / self.request.cluster.devices
        return rest + (self._held[level] - rest) / shape.microbatches

    @cached_property
    def rest_bytes(self) -> float:
        """Bytes of all that rests, on one device."""
        cluster = self.request.cluster
        prices = Prices(cluster.line(1).mesh((1,)), cluster.device, self.request.settings)
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

    def crossing(self, plan: Plan, microbatches: int) -> list[tuple[Ref, ...]]:
        """What a cut in front of each piece sends: the same for all plans of this graph."""
        shared = self.shared(microbatches)
        totals = shared.totals if shared is not None else ()
        if totals not in self._crossing:
            self._crossing[totals] = crossing(self.whole.program, plan, totals)
        return self._crossing[totals]

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
