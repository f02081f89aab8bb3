"""Plans with pipeline stages: by a named recipe, or where nothing fits on one stage.

For every length of the pipeline axis, number of microbatches and mesh of a place: one Problem for what a place does (its
share of all microbatches and of what a step costs once), then the cuts (`pipeline.balance`), then the length of the step under
the schedule's own order (`pipeline.orders`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar import planner
from autopar.cluster import Cluster, Mesh
from autopar.cost.comm import collective_s
from autopar.errors import InfeasibleError
from autopar.pipeline.assemble import pipelined
from autopar.pipeline.balance import Cost, balance, memory_bytes
from autopar.pipeline.costs import costs
from autopar.pipeline.microbatches import Microbatching
from autopar.pipeline.orders import StageTime, in_flight, orders, step_s
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.pipeline.sharing import sharing
from autopar.pipeline.units import units
from autopar.pipeline.views import views
from autopar.plan import Alternative, Plan, Predicted
from autopar.planner import Planner, Request
from autopar.problem.build import Model, build
from autopar.problem.prices import Prices
from autopar.problem.shares import MicroPrices, Share, StepPrices, combined
from autopar.problem.types import Solution
from autopar.recipes import roles
from autopar.recipes.pipelines import PIPELINES, PipelineRecipe
from autopar.search import ilp

SOLVE_S = 2.0  # seconds for one mesh of one place
MICROBATCHES = (1, 2, 4, 8, 16)  # times the number of places


@dataclass(eq=False)
class Shape:
    """One way to lay a pipeline: places, mesh of a place, stages per place, microbatches."""

    places: int
    mesh: tuple[int, ...]
    virtual: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.places} places of {'x'.join(map(str, self.mesh))}, {self.microbatches} microbatches"


@dataclass(eq=False)
class Found:
    """One priced pipeline."""

    plan: Plan  # without a prediction
    step_s: float
    memory_bytes: float
    compute_s: float


def plan(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """As `planner.plan`, with pipelines: those that `request.recipe` names, and where nothing fits without.

    Raises InfeasibleError when nothing fits at all, PlanError for what cannot be asked for.
    """
    if request.recipe in PIPELINES:
        return _Pipelines(gm, hints, request).plan([PIPELINES[request.recipe]], about)
    try:
        return planner.plan(gm, hints, request, **about)
    except InfeasibleError as error:
        if request.recipe is not None or request.mesh is not None or not request.settings.training:
            raise
        try:
            return _Pipelines(gm, hints, request).plan([r for r in PIPELINES.values() if r.searched], about)
        except InfeasibleError as second:
            raise InfeasibleError(f"{error}\nin pipeline stages: {second}", missing_bytes=error.missing_bytes) from error


class _Pipelines:
    """Prices pipelines of one graph."""

    def __init__(self, gm: fx.GraphModule, hints: Mapping[str, int], request: Request) -> None:
        self.gm, self.hints, self.request = gm, dict(hints), request
        self.whole = Planner.of(gm, hints, request)
        self.pieces = len(units(self.whole.program))
        self._planners: dict[int, Planner] = {1: self.whole}
        self._shared: dict[int, Microbatching] = {}
        self._why: list[str] = []

    def plan(self, recipes: Sequence[PipelineRecipe], about: Mapping[str, Any]) -> Plan:
        """The fastest pipeline of some recipes."""
        deadline = time.monotonic() + self.request.time_limit_s
        best: Found | None = None
        tried: list[Alternative] = []
        for recipe in recipes:
            for shape in self._shapes(recipe):
                if time.monotonic() > deadline + (0.0 if best is not None else self.request.time_limit_s):
                    break  # twice the time while there is no answer
                self.request.say(f"{recipe.name}: {shape}")
                with suppress(InfeasibleError):
                    found = self._price(recipe, shape)
                    tried.append(Alternative(recipe.name, (shape.places, *shape.mesh), found.step_s, found.memory_bytes))
                    best = found if best is None or found.step_s < best.step_s else best
        if best is None:
            raise InfeasibleError(f"none of {', '.join(r.name for r in recipes)} fits {self.request.cluster.label}: "
                                  + ("; ".join(dict.fromkeys(self._why[-3:])) or f"no way to lay {self.pieces} pieces and "
                                     f"a batch of {self.hints.get('b')} on {self.request.cluster.devices} devices"))
        return self._finished(best, tried, about)

    def _shapes(self, recipe: PipelineRecipe) -> Iterator[Shape]:
        """The shapes worth trying: those whose innermost axis is that of the cluster first, then short pipelines."""
        inner_size = self.request.cluster.levels[-1].size
        yield from sorted(self._all_shapes(recipe), key=lambda s: (s.mesh[-1] != inner_size, s.places))

    def _all_shapes(self, recipe: PipelineRecipe) -> Iterator[Shape]:
        devices, batch = self.request.cluster.devices, self.hints.get("b", 1)
        schedule = SCHEDULES[recipe.schedule]
        for mesh in self.request.cluster.meshes(max_axes=1 + len(recipe.roles)):
            places, inner = mesh[0], mesh[1:] or (1,)
            if self.request.mesh is not None and inner != self.request.mesh:
                continue
            virtual = schedule.virtual or recipe.virtual
            used = recipe.roles_on(inner)
            if places < 2 or used is None or places * virtual > self.pieces or devices != places * math.prod(inner):
                continue
            if not self._may_rest(places, inner, used):
                continue
            ways = math.prod(n for n, role in zip(inner, used, strict=True) if role in (roles.data, roles.zero3))
            counts = [1] if schedule.name == "naive" else [k * places for k in MICROBATCHES]
            for count in counts:
                if batch % (count * ways) == 0:
                    yield Shape(places, inner, virtual, count)

    def _may_rest(self, places: int, inner: tuple[int, ...], used: Sequence[roles.Role]) -> bool:
        """Whether weights, gradients and optimizer state alone can fit when cut as evenly as the roles allow."""
        cut = places * math.prod(n for n, role in zip(inner, used, strict=True) if role is not roles.data)
        return self._rest_bytes / cut <= self.request.cluster.device.usable_memory_bytes

    @cached_property
    def _rest_bytes(self) -> float:
        """Bytes of all that rests, on one device."""
        line = replace(self.request.cluster.levels[-1], size=1)
        prices = Prices(Cluster("one", (line,), self.request.cluster.device).mesh((1,)), self.request.cluster.device, self.request.settings)
        return sum(prices.rest_bytes(op, ("R",)) for op in self.whole.program.ops.values() if op.role == "param")

    def _planner(self, microbatches: int) -> Planner:
        """The program at the sizes of one microbatch."""
        if microbatches not in self._planners:
            hints = {**self.hints, "b": self.hints["b"] // microbatches}
            self._planners[microbatches] = Planner.of(self.gm, hints, self.request)
        return self._planners[microbatches]

    def _mesh(self, shape: Shape) -> tuple[Mesh, Mesh]:
        """The pipeline axis, and the mesh of a place."""
        whole = self.request.cluster.mesh((shape.places, *shape.mesh))
        return Mesh(whole.axes[:1]), Mesh(whole.axes[1:])

    def _price(self, recipe: PipelineRecipe, shape: Shape) -> Found:
        """The best that one shape can do. Raises InfeasibleError where it does not fit."""
        line, mesh = self._mesh(shape)
        here = self._planner(shape.microbatches)
        used = recipe.roles_on(shape.mesh)
        assert used is not None, "shapes have meshes that the recipe can be on"
        joints = [here.joints(role, n) for role, n in zip(used, shape.mesh, strict=True)]
        device, limit = self.request.cluster.device, self.request.cluster.device.usable_memory_bytes
        micro, once = (build(here.program, here.clusters, joints, kind(mesh, device, self.request.settings), limit, recipe.name)
                       for kind in (MicroPrices, StepPrices))
        stages = shape.places * shape.virtual
        schedule = SCHEDULES[recipe.schedule]
        order = orders(schedule.name, shape.places, stages, shape.microbatches)
        flying = in_flight(order, stages)
        model = combined(micro, once, self._share(shape, flying), limit)
        try:
            solution = ilp.search(model.problem, time_limit_s=SOLVE_S, seed=self.request.seed)
            pieces = costs(here.program, micro, once, solution.choice)
            bounds = balance(pieces, flying, limit / shape.virtual)
        except InfeasibleError as error:
            self._why.append(f"{shape}: {error}")
            raise
        return self._timed(recipe, shape, model, solution, pieces, bounds, line, order, flying, schedule)

    def _share(self, shape: Shape, flying: Sequence[int]) -> Share:
        """What stands for the step of the busiest place: all microbatches and the time until the pipeline is full, its part of
        the weights, the activations that the first place keeps."""
        p, m, stages = shape.places, shape.microbatches, shape.places * shape.virtual
        kept = sum(flying[stage] for stage in range(0, stages, p)) / stages
        return Share((m + (p - 1) / shape.virtual) / p, 1 / p, kept, 1 / p)

    def _timed(self, recipe: PipelineRecipe, shape: Shape, model: Model, solution: Solution, pieces: Sequence[Cost], bounds: list[int],
               line: Mesh, order: Any, flying: Sequence[int], schedule: Schedule) -> Found:
        """The step under the schedule's order, and the memory of the fullest place."""
        cuts = [0, *bounds, len(pieces)]
        parts = [pieces[a:b] for a, b in itertools.pairwise(cuts)]
        base = self._assembled(recipe, shape, model, solution, bounds)
        times = [_stage_time(part, self._send_s(base, view.sends, line, shape), schedule.splits_backward and view.separable,
                             self.request.settings.training)
                 for part, view in zip(parts, views(self.whole.program, base), strict=True)]
        places = [schedule.place(i, shape.places) for i in range(len(parts))]
        once = [sum(c.once_s for part, at in zip(parts, places, strict=True) if at == place for c in part) for place in range(shape.places)]
        memory = [sum(memory_bytes(part, n) for part, n, at in zip(parts, flying, places, strict=True) if at == place)
                  for place in range(shape.places)]
        limit = self.request.cluster.device.usable_memory_bytes
        idle = [place for place in range(shape.places) if not any(c.rest_bytes for part, at in zip(parts, places, strict=True) if at == place
                                                                  for c in part)]
        if idle:  # torch's optimizers refuse a rank without parameters, and there is nothing to gain
            raise InfeasibleError(f"place {idle[0]} of {shape.places} would hold no parameter")
        if max(memory) > limit:
            why = f"place {memory.index(max(memory))} needs {max(memory) / 2**30:.2f} GiB, {limit / 2**30:.2f} GiB are there"
            self._why.append(f"{shape}: {why}")
            raise InfeasibleError(why, missing_bytes=max(memory) - limit)
        seconds = step_s(order, times, places) + max(once)
        busy = max(sum(shape.microbatches * c.micro_s for part, at in zip(parts, places, strict=True) if at == place for c in part)
                   for place in range(shape.places))
        return Found(base, seconds, max(memory), busy)

    def _send_s(self, base: Plan, sends: Sequence[Any], line: Mesh, shape: Shape) -> float:
        """Seconds of sending what leaves a stage in one microbatch."""
        program = self._planner(shape.microbatches).program
        cut = [planner.local_share(base, ref) * program.bytes_of(ref) for ref in sends]
        return sum(collective_s("send", nbytes, line.axes[0]) for nbytes in cut)

    def _assembled(self, recipe: PipelineRecipe, shape: Shape, model: Model, solution: Solution, bounds: Sequence[int]) -> Plan:
        """The plan, without a prediction."""
        _, mesh = self._mesh(shape)
        flat = planner.bare_plan(self.whole, mesh, model.decode(solution.choice), recipe.name)
        return pipelined(flat, self.whole.program, bounds, recipe.schedule, shape.places, self._sharing(shape.microbatches), shape.microbatches)

    def _sharing(self, microbatches: int) -> Microbatching | None:
        """How so many microbatches share values, whatever the shape; None for one."""
        if microbatches == 1:
            return None
        if microbatches not in self._shared:
            self._shared[microbatches] = sharing(self.whole.program, self.whole.clusters, self.whole.table(microbatches, placed=False),
                                                 microbatches, self.request.cluster, self.request.settings)
        return self._shared[microbatches]

    def _finished(self, best: Found, tried: Sequence[Alternative], about: Mapping[str, Any]) -> Plan:
        predicted = Predicted(best.step_s, best.memory_bytes, best.compute_s, max(0.0, best.step_s - best.compute_s), 0.0)
        notes = (*about.get("notes", ()), *planner.rule_notes(self.whole))
        return replace(best.plan, predicted=predicted, alternatives=tuple(tried), **{**about, "notes": notes})


def _stage_time(part: Sequence[Cost], send_s: float, split: bool, training: bool) -> StageTime:
    """A stage's time, the backward twice the forward: half of it for what was received, half for the weights."""
    seconds = sum(c.micro_s for c in part)
    if not training:
        return StageTime(seconds, 0.0, 0.0, send_s)
    third = seconds / 3
    return StageTime(third, third if split else 2 * third, third if split else 0.0, send_s)
