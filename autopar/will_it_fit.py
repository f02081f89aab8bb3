"""Will it fit? The memory that one device and each named strategy need, and the largest batch and sequence that they
have room for. Called by `autopar memory`.

A strategy is planned at the asked sizes. Where it does not fit, the plan is its solution of least memory, so that there
are figures to show. The layouts of that plan are then walked with other sizes, also with all blocks run again, and
those of a pipeline with as many microbatches as the batch allows, because recipes leave both open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import fx

from autopar import joint
from autopar.bare_plan import bare_plan, laid
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.joint.shapes import MOST_MICROBATCHES
from autopar.layout import parse, ways_of
from autopar.memory import Place, Prediction, hosts, predict
from autopar.memory.largest import largest
from autopar.named_strategies import meshes_for, undivided
from autopar.partial_remat import filled
from autopar.pipeline.orders import PLAIN, orders
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.build import Model
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.problem.remat import levels
from autopar.problem.types import Problem
from autopar.recipes import RECIPES, Recipe
from autopar.recipes import offload as offloads
from autopar.recipes.names import check_name
from autopar.recipes.offload import OFFLOADS, Offload
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from autopar.search import ilp
from autopar.search.feasible import least_memory
from autopar.timer import TIME_LIMIT_S
from passes import facts
from passes.part_runs import Parts, part_runs

STRATEGY_SOLVE_S = 2.0  # seconds at most to solve one strategy on one mesh
PIPELINE_SOLVE_S = 4.0  # seconds at most to solve one pipeline recipe, unless there is nothing to show by then
LARGEST = 1 << 22  # sizes beyond this are not looked at
ROUNDS = 64  # microbatches per place: up to so many are tried one by one, more of them in steps


@dataclass(frozen=True)
class Row:
    """One strategy.

    plan, prediction    None where the strategy is impossible; `why` says why
    place               the place of the plan that has least room left
    limit_bytes         the bytes that a plan may fill of a device there
    largest             by symbol, the largest size that fits with the others as planned (0: none)
    host_bytes          bytes on the host for each device, of `host_limit_bytes` there
    """

    name: str
    mesh: tuple[int, ...]
    limit_bytes: float
    plan: Plan | None = None
    prediction: Prediction | None = None
    place: Place | None = None
    why: str = ""
    largest: Mapping[str, int] = field(default_factory=dict)
    host_bytes: float = 0.0
    host_limit_bytes: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether the peak of each device is within its limit, and the bytes on hosts are within theirs."""
        return (
            self.place is not None
            and self.place.peak_bytes <= self.limit_bytes
            and self.host_bytes <= self.host_limit_bytes
        )


@dataclass(eq=False)
class Survey:
    """All strategies for one graph."""

    gm: fx.GraphModule
    hints: Mapping[str, int]
    request: Request
    _programs: dict[tuple[tuple[int, ...], str], Program] = field(default_factory=dict)

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int | None, int]]:
        """Symbol -> (least size, greatest size, step) for which the graph is valid."""
        return facts.spans(self.gm)

    @property
    def most(self) -> dict[str, int | None]:
        """The greatest size of each symbol that the graph allows (as the number of positions of the model); None:
        any."""
        return {name: most for name, (_, most, _) in self._spans.items()}

    def rows(self, names: Sequence[str] = ()) -> Iterator[Row]:
        """One device, then the recipes `names` on the cluster, all of them without names. Raises PlanError for unknown
        names."""
        for name in names:
            check_name(name)
        yield self._row("one device", self._one_device())
        planner = Planner.of(self.gm, self.hints, self.request)
        for name, recipe in RECIPES.items():
            if name in names or (not names and name != "single" and recipe.fits(planner.program)):
                self.request.say(name)
                yield self._row(name, self._recipe(planner, recipe))
        several = self.request.settings.training and self.request.cluster.devices > 1
        for name, pipeline in PIPELINES.items():
            if several and (name in names or (not names and pipeline.fits(planner.program))):
                self.request.say(name)
                yield self._row(name, self._pipeline(name))
        for name, offload in OFFLOADS.items():
            if name in names or (not names and self._has_hosts):
                self.request.say(name)
                yield self._row(name, self._on_host(planner, offload))

    @property
    def _has_hosts(self) -> bool:
        """Whether the devices have hosts with memory of their own, so that offloading is possible."""
        device = self.request.cluster.device
        return self.request.settings.training and device.kind != "cpu" and not offloads.unknown(device)

    def _one_device(self) -> Plan | str:
        """The plan of one device, or why there is none."""
        alone = replace(self.request, cluster=self.request.cluster.line(1), mesh=None)
        return self._recipe(Planner.of(self.gm, self.hints, alone), replace(RECIPES["single"], name="one device"))

    def _recipe(self, planner: Planner, recipe: Recipe) -> Plan | str:
        """The recipe on the mesh where it is fastest among those where it fits, with as little run again as that needs;
        where it fits on none, on the mesh where it takes least memory. Or why there is no plan."""
        if lacking := recipe.lacking(planner.program):
            return lacking
        found: list[tuple[bool, float, Plan]] = []
        why = "the cluster has no such mesh"
        for level in planner.open_levels:
            planner.remat = planner.levels(level)
            for sizes in meshes_for(recipe, planner.request.cluster, planner.request.mesh):
                if said := undivided(planner.program, recipe, sizes):
                    why = said
                    continue
                try:
                    found.append(self._on_mesh(planner, recipe, sizes))
                except InfeasibleError as error:
                    why = str(error)
            if any(not over for over, *_ in found):
                break
        return min(found, key=lambda one: one[:2])[2] if found else why

    def _on_mesh(self, planner: Planner, recipe: Recipe, sizes: tuple[int, ...]) -> tuple[bool, float, Plan]:
        """(does not fit, seconds or where it does not fit its peak in bytes, plan) of a recipe on one mesh: the least
        of these is the best."""
        used, mesh = recipe.roles_on(len(sizes)), planner.request.cluster.mesh(sizes)

        def plan(model: Model, choice: tuple[int, ...]) -> Plan:
            return bare_plan(planner, mesh, model.decode(choice), recipe.name, planner.remat)

        with suppress(InfeasibleError):
            found = filled(
                planner, planner.candidate(sizes, used, recipe.name, partial(ilp.search, time_limit_s=STRATEGY_SOLVE_S))
            )
            return False, found.cost.time_s, laid(planner, found)
        model = planner.model(sizes, used, recipe.name)
        plans = [plan(model, choice) for choice in _without_limit(model.problem)]
        peak, least = min((self.predicted(each).peak_bytes, number) for number, each in enumerate(plans))
        return True, peak, plans[least]

    def _on_host(self, planner: Planner, offload: Offload) -> Plan | str:
        """The plan of an offloading strategy, or why there is none."""
        try:
            offloads.checked(offload.name, self.request.cluster, self.request.settings)
        except PlanError as error:
            return str(error)
        settings = replace(self.request.settings, offload=offload.held)
        return self._recipe(planner.anew(replace(self.request, settings=settings)), RECIPES[offload.base])

    def _pipeline(self, name: str) -> Plan | str:
        """The plan of a named pipeline, or why there is none: where none fits, one of any memory, so that there are
        figures; where time was up before there was that either, the same in the time of a search."""
        soon = replace(self.request, recipe=name, time_limit_s=PIPELINE_SOLVE_S)
        anywhere = replace(soon, memory_bytes=math.inf)
        why = ""
        for request in (soon, anywhere, replace(anywhere, time_limit_s=TIME_LIMIT_S)):
            try:
                return joint.plan(self.gm, self.hints, request)
            except (InfeasibleError, PlanError) as error:
                why = str(error)
        return why

    @property
    def limit_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""
        return float(self.request.limit_bytes)

    def predicted(self, plan: Plan, **sizes: int) -> Prediction:
        """What a plan takes, at other sizes than those planned for where they are given."""
        return predict(self._program({**self.hints, **sizes}, plan.parted), plan)

    def _program(self, hints: Mapping[str, int], parts: Parts) -> Program:
        """The program at the sizes `hints`, with runs of blocks divided into `parts`; read once."""
        key = tuple(hints.values()), json.dumps(parts)
        if key not in self._programs:
            self._programs[key] = read(
                part_runs(self.gm, parts) if parts else self.gm,
                hints,
                training=self.request.settings.training,
                device=self.request.cluster.device.kind,
            )
        return self._programs[key]

    def _row(self, name: str, plan: Plan | str) -> Row:
        """The row of a plan, or of the reason why there is none."""
        if isinstance(plan, str):
            return Row(name, (), self.limit_bytes, why=plan)
        prediction, limits = self.predicted(plan), self._limits(plan)
        place = min(prediction.places, key=lambda place: limits[place.number] - place.peak_bytes)
        host_bytes = hosts.of_a_device(self._program(self.hints, plan.parted), plan)
        host_limit_bytes = self.request.cluster.device.host_memory_bytes if plan.offload else math.inf
        held = host_bytes <= host_limit_bytes  # what is on hosts is as much at any size
        return Row(
            name,
            plan.grid,
            limits[place.number],
            plan,
            prediction,
            place,
            largest={symbol: self._largest(plan, symbol, limits) if held else 0 for symbol in self.hints},
            host_bytes=host_bytes,
            host_limit_bytes=host_limit_bytes,
        )

    def _largest(self, plan: Plan, symbol: str, limits: Sequence[float]) -> int:
        """The largest size of `symbol` that fits within `limits` (bytes of each place), also with all blocks run
        again."""
        found = self._largest_of(plan, symbol, limits)
        if self._is_most(found, plan, symbol) or plan.mode != "train" or self.request.remat != "auto":
            return found
        if not (again := levels(self._program(self.hints, plan.parted), "full")):
            return found
        stages = tuple(replace(stage, again={}) for stage in plan.stages)
        return max(found, self._largest_of(replace(plan, remat=again, stages=stages), symbol, limits))

    def _is_most(self, size: int, plan: Plan, symbol: str) -> bool:
        """Whether no larger size is looked at."""
        most = self.most.get(symbol)
        return size == most if most else size + self._step(plan, symbol) > LARGEST

    def _largest_of(self, plan: Plan, symbol: str, limits: Sequence[float]) -> int:
        """The largest size of `symbol` that fits, with the blocks that `plan` runs again; of a pipeline also with more
        microbatches."""
        most = self.most.get(symbol) or LARGEST
        found = largest(self._peak(plan, symbol, limits), max(limits), self._step(plan, symbol), most)
        if plan.microbatches == 1 or self._is_most(found, plan, symbol):
            return found
        if symbol == "b":
            return max(found, self._largest_batch(plan, limits, most))
        if (finest := self._finest(plan, self.hints["b"])) is None:
            return found
        return max(found, largest(self._peak(finest, symbol, limits), max(limits), self._step(plan, symbol), most))

    def _largest_batch(self, plan: Plan, limits: Sequence[float], most: int) -> int:
        """The largest batch of a pipeline that fits: with one sample per rank and microbatch up to ROUNDS microbatches
        per place; beyond that with more microbatches, and more samples in each."""
        ways, step = self._ways(plan), self._microbatch_step(plan)
        top = ROUNDS * plan.places
        least = next((n for n in range(step, top + 1, step) if _runs(plan, n)), None)
        if least is None or least * ways > most:
            return 0
        finer = largest(
            lambda size: self._finest_peak(plan, max(size, least * ways), limits),
            max(limits),
            ways * step,
            min(most, ways * top),
        )
        if finer < ways * top:
            return finer

        def coarser(microbatches: int) -> int:
            peak = self._peak(replace(plan, microbatches=microbatches), "b", limits)
            return largest(peak, max(limits), ways * microbatches, most)

        found = coarser(top)
        if found + ways * top > most:  # as small models do; schedules of many microbatches take seconds to lay out
            return max(finer, found)
        counts = (MOST_MICROBATCHES, MOST_MICROBATCHES // 2, MOST_MICROBATCHES // 4)
        return max(finer, next((more for rounds in counts if (more := coarser(rounds * plan.places))), found))

    def _finest_peak(self, plan: Plan, batch: int, limits: Sequence[float]) -> float:
        """The peak of a pipeline with one sample per rank and microbatch, for a batch of so many samples."""
        return self._peak(replace(plan, microbatches=batch // self._ways(plan)), "b", limits)(batch)

    def _finest(self, plan: Plan, batch: int) -> Plan | None:
        """The plan with the most microbatches into which its `batch` goes; None where its schedule runs none."""
        each = batch // self._ways(plan)
        counts = (
            n
            for n in range(min(each, ROUNDS * plan.places), 1, -1)
            if each % n == 0 and n % self._microbatch_step(plan) == 0
        )
        return next((replace(plan, microbatches=n) for n in counts if _runs(plan, n)), None)

    def _microbatch_step(self, plan: Plan) -> int:
        """The step between numbers of microbatches that the schedule runs: schedules of several stages per place run
        rounds of as many microbatches as there are places."""
        return 1 if plan.schedule in PLAIN else plan.places

    def _limits(self, plan: Plan) -> list[float]:
        """For each place of a plan, the bytes of its devices that the plan may fill."""
        at = Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh)
        return [
            float(at.device(place).usable_memory_bytes) if at.mixed else self.limit_bytes
            for place in range(plan.places)
        ]

    def _peak(self, plan: Plan, symbol: str, limits: Sequence[float]) -> Callable[[int], float]:
        """A function: size of `symbol` -> the peak of a place, scaled as if all places had the limit of the largest."""
        return lambda size: max(
            place.peak_bytes + max(limits) - limits[place.number]
            for place in self.predicted(plan, **{symbol: size}).places
        )

    def _step(self, plan: Plan, symbol: str) -> int:
        """The step between sizes that are tried. A batch must divide evenly by ranks and microbatches. A sequence is
        tried in steps of the ranks that cut something, but in no more than 64 steps up to the planned one."""
        if symbol != "b":
            fine = math.lcm(*plan.mesh, self._spans[symbol][2] if symbol in self._spans else 1)
            return max(fine, self.hints[symbol] // 64 // fine * fine)
        return self._ways(plan) * plan.microbatches

    def _ways(self, plan: Plan) -> int:
        """The number of ranks of a place that the batch is cut over."""
        program = self._program(self.hints, plan.parted)
        inputs = [(op.name, op.samples) for op in program.ops.values() if op.samples is not None]
        lies = [(parse(plan.nodes[name].outs[0].split("|")[0]), samples) for name, samples in inputs]
        return max((ways_of(layout, samples, plan.mesh) for layout, samples in lies), default=1)


def _runs(plan: Plan, microbatches: int) -> bool:
    """Whether the schedule of a pipeline can run so many microbatches."""
    try:
        orders(plan.schedule, plan.places, len(plan.stages), microbatches)
    except PlanError:
        return False
    return True


def _without_limit(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The solution of least memory and the fastest one, both regardless of the memory limit: either may have the lower
    peak."""
    roomy = replace(problem, memory_limit_bytes=math.inf)
    return least_memory(roomy, time_limit_s=STRATEGY_SOLVE_S), ilp.search(roomy, time_limit_s=STRATEGY_SOLVE_S).choice
