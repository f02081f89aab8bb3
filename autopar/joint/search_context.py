"""SearchContext: what the search derives from one graph, made when first asked for and then shared by all of joint: for
each shape and one role per mesh axis the Problems (shape_problems) and their solutions, and for all shapes the least
work, the memory of parameters, and how microbatches share values.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.cluster import Device, Mesh, Places
from autopar.errors import PlanError
from autopar.joint import shape_models
from autopar.joint.place_kinds import Ground, grounds
from autopar.joint.sends import with_sends
from autopar.joint.shape_problems import Chosen, Mixed, Models
from autopar.joint.shapes import QuickLook, Shape, fewest, sample_groups
from autopar.joint.shared_results import ProgramResults, WeightTotals
from autopar.joint.timetables import Timetable
from autopar.pipeline.crossing import crossing
from autopar.pipeline.microbatch_splits import sharing
from autopar.pipeline.microbatches import Microbatching, of_parts
from autopar.pipeline.stretches import Cost
from autopar.pipeline.units import Unit
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.kernels import Kernels
from autopar.problem.memory_floor import least_bytes
from autopar.problem.prices import Prices
from autopar.problem.step_shares import Share, combined
from autopar.problem.time_floor import Work
from autopar.recipes import roles
from autopar.recipes.roles import Role
from autopar.request import Request
from autopar.rules.language import Option
from autopar.search import ilp
from autopar.timer import Timer
from passes.part_runs import Parts, whole_name

SHAPE_SOLVE_S = 2.0  # seconds at most to solve one Problem of a shape
SOLVED = 0.005  # relative: a solution proven to be this close to the optimum is good enough
TRUST = 0.95  # factor on the bound of a Problem of several kinds of places: their weights in it are approximate


class SearchContext:
    """All Problems of one graph, made when first asked for.

    Contexts for another memory limit, recipe, offloading or division of runs share all results that do not depend on
    what differs (`_derived`).

    `whole` is the planner of the graph at the sizes of the whole batch. `limit_bytes` is the memory that a plan may
    fill on each device, `timer` the time that is left for the search. With offloading, `on_devices` is the same without
    it. `best_s` is the fastest step that is known.
    """

    def __init__(self, gm: fx.GraphModule, hints: Mapping[str, int], request: Request) -> None:
        self.timer = Timer(request.time_limit_s)
        self.gm, self.hints, self.request = gm, dict(hints), request
        self.whole = Planner.of(gm, hints, request)
        self._of_program, self._of_weights = ProgramResults(self.whole.program, {1: self.whole}), WeightTotals()
        self._models: dict[tuple[Shape, tuple[Role, ...]], Models] = {}
        # by planner and device: prices on devices of other parts of the cluster than the first
        self._part_kernels: dict[tuple[int, Device], tuple[Kernels, Kernels]] = {}
        self._parts_work: dict[str, Work] = {}  # by level of rematerialisation: the least work on all parts
        self._paces: dict[Device, float] = {}
        self._hosted: dict[str, SearchContext] = {}
        self.on_devices: SearchContext | None = None
        self.best_s = math.inf
        self._roomy: dict[float, dict[Shape, float]] = {}
        self._parted: dict[str, SearchContext] = {}
        self._parts: Parts = {}  # the runs that are divided
        self._undivided: SearchContext | None = None  # the context of the graph whose runs are not divided
        self.limit_bytes, self._asked_bytes = request.limit_bytes, request.memory_bytes
        self.answered: Callable[[float], None] = lambda known_s: None  # called with the step time of each better plan
        self.quick_s: QuickLook | None = None

    def restart(self) -> None:
        """Start the time limit again."""
        self.timer = Timer(self.request.time_limit_s)

    def _derived(
        self,
        *,
        of_program: ProgramResults | None = None,
        of_weights: WeightTotals | None = None,
        hosted: dict[str, SearchContext] | None = None,
    ) -> SearchContext:
        """A copy that shares all results but those given; Problems are shared only if both kinds of results are.
        `hosted`: copies with offloading that remain valid (None: none do)."""
        other = copy.copy(self)
        if of_program is not None or of_weights is not None:
            other._models = {}
        other._of_program, other._of_weights = of_program or self._of_program, of_weights or self._of_weights
        other._hosted, other._parted = {} if hosted is None else hosted, {}
        return other

    def limited(self, limit_bytes: float) -> SearchContext:
        """The same with another memory limit per device."""
        other = self._derived(hosted=self._hosted)
        other.limit_bytes = other._asked_bytes = limit_bytes
        return other

    def named(self, recipe: str, mesh: tuple[int, ...]) -> SearchContext:
        """The same for a recipe on a mesh."""
        other = self._derived()
        other.request = replace(self.request, recipe=recipe, mesh=mesh)
        other.whole = self.whole.anew(other.request)
        return other

    def hosted(self, held: str) -> SearchContext:
        """The same with `held` offloaded to the host (problem.settings.OFFLOADED)."""
        if held not in self._hosted:
            other = self._hosted[held] = self._derived(of_weights=WeightTotals())
            other.request = replace(self.request, settings=replace(self.request.settings, offload=held))
            other.whole = self.whole.anew(other.request)
        made = self._hosted[held].limited(self.limit_bytes)
        made.on_devices, made.timer = self, self.timer
        return made

    def parted(self, parts: Parts) -> SearchContext:
        """The same with runs of blocks divided into `parts` (Plan.parted)."""
        key = json.dumps(parts)
        if key not in self._parted:
            self._parted[key] = self._with_parts(parts) if parts else self
        return self._parted[key]

    def _with_parts(self, parts: Parts) -> SearchContext:
        whole = self.whole.parted(parts)
        other = self._derived(of_program=ProgramResults(whole.program, {1: whole}))
        other.gm, other.whole, other._parts, other._undivided = whole.gm, whole, parts, self
        return other

    def program_of(self, plan: Plan) -> Program:
        """The program that a plan is for, whose runs of blocks may be in parts."""
        return self.parted(plan.parted).whole.program

    def origin(self, name: str) -> str:
        """The name, in the whole run, of an operator of a part of it; `name` itself for others."""
        return whole_name(name, self._parts)

    @property
    def roomy(self) -> dict[Shape, float]:
        """Step times of shapes for which the search without offloading was not short of memory: offloading gains
        nothing there."""
        return self._roomy.setdefault(self.limit_bytes, {})

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.hints.get("b", 1)

    @property
    def units(self) -> list[Unit]:
        """The pieces that the model can be cut into."""
        return self._of_program.units

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return len(self.units)

    @property
    def alike(self) -> int:
        """How many of the pieces are blocks, of which stages should have about the same number; all pieces where there
        are no blocks."""
        return sum(run.count for run in self.whole.program.runs.values()) or self.pieces

    def work(self, places: int, level: str = "none") -> Work:
        """The least work of a step on one place or on several, with all blocks run again at `level` (one of
        problem.remat.LEVELS)."""
        parts = self.request.cluster.parts
        if places == 1 or not parts:
            return self.whole.work(level)
        if level not in self._parts_work:
            whole, devices = self.whole, [(part.device, part.devices) for part in parts]
            self._parts_work[level] = Work.mixed(
                whole.program, whole.branches, devices, self.request.settings, whole.again(level)
            )
        return self._parts_work[level]

    def pace(self, device: Device) -> float:
        """The speed of one device: how many times per second it could run all operators at its best rates."""
        if device not in self._paces:
            self._paces[device] = 1 / self.whole.work_on(device).rates_s
        return self._paces[device]

    def paces(self, shape: Shape) -> list[list[float]]:
        """The `pace` of the devices of each place (1 where all are alike), for every order of the cluster's parts that
        is tried."""
        if not self.request.cluster.parts or shape.places == 1:
            return [[1.0] * shape.places]
        return [
            [self.pace(ground.places.device(place)) for place in range(shape.places)] for ground in self.grounds(shape)
        ]

    def planner(self, microbatches: int) -> Planner:
        """The program at the sizes of one microbatch."""
        if microbatches not in self._of_program.planners:
            self._of_program.planners[microbatches] = Planner.of(
                self.gm, {**self.hints, "b": self.batch // microbatches}, self.request
            )
        return self._of_program.planners[microbatches]

    def mesh(self, shape: Shape) -> Mesh:
        """The mesh of a place, with the names of the first one's axes."""
        return self.request.cluster.places(shape.places, shape.mesh).mesh(0)

    def grounds(self, shape: Shape) -> list[Ground]:
        """The places of a shape, with the parts of the cluster in every order that is tried."""
        return grounds(self.request.cluster, shape.places, shape.mesh, self._room_bytes)

    def _room_bytes(self, at: Places, place: int) -> float:
        """Bytes that a plan may fill on a place: what its device has, and no more than was asked for."""
        if not at.mixed:
            return self.limit_bytes
        asked = self._asked_bytes
        own = float(at.device(place).usable_memory_bytes)
        return own if asked is None else asked if math.isinf(asked) else min(own, asked)

    def mean_bytes(self, places: int) -> float:
        """Bytes that a plan may fill on a device of several places, on average."""
        cluster = self.request.cluster
        if places == 1 or not cluster.parts:
            return self.limit_bytes
        one = Places(cluster, cluster.devices, (1,))
        return sum(self._room_bytes(one, place) for place in range(cluster.devices)) / cluster.devices

    def models(self, shape: Shape, used: tuple[Role, ...]) -> Models:
        """Raises InfeasibleError where sizes and roles leave some operator without a choice."""
        key = (shape, used)
        if key not in self._models:
            self._models[key] = shape_models.open_choices(self, shape, used)
        return self._models[key]

    def kernels(self, here: Planner, device: Device) -> tuple[Kernels, Kernels]:
        """Prices of the operators on one device, and of their forward alone; made once."""
        if device == here.kernels.device:
            return here.kernels, here.forward_kernels
        key = (id(here), device)
        if key not in self._part_kernels:
            settings = self.request.settings
            self._part_kernels[key] = Kernels(device, settings), Kernels(device, replace(settings, mode="inference"))
        return self._part_kernels[key]

    def solve(
        self,
        models: Models,
        table: Timetable,
        level: str,
        *,
        exact: bool,
        cutoff_s: float = math.inf,
        start: tuple[int, ...] | None = None,
        each: bool = False,
        spare_bytes: float = 0.0,
        beside: bool = True,
    ) -> Chosen:
        """Choose the layouts of a place under `table`, with all blocks run again at `level`: exactly, or at a glance,
        which ends once it is proven that nothing is as fast as `cutoff_s`, and begins also at the solution `start`,
        which may do what is forbidden in `models`. With `each`, gradients may also be scattered after every
        microbatch. `spare_bytes` per device stay free. Without `beside` nothing overlaps sums of gradients once per
        step, and the bound is of that. Raises InfeasibleError where nothing fits."""
        share, trust = Share(table.length, 1 / table.places, table.kept, 1 / table.places), 1.0
        if isinstance(models, Mixed):
            trust = TRUST * models.weights.even(table.length, table.microbatches)
        limit_bytes = self.mean_bytes(table.places) - spare_bytes
        once = models.once if beside else replace(models.once, problem=models.once.problem.shown())
        model = combined(models.at(level), once, share, limit_bytes)
        model = with_sends(self, model if each else model.without(models.scattering_each), table)
        problem = model.problem
        solution = (
            ilp.search(problem, time_limit_s=SHAPE_SOLVE_S, seed=self.request.seed, gap=SOLVED)
            if exact
            else ilp.glance(problem, time_limit_s=SHAPE_SOLVE_S, cutoff_s=cutoff_s / trust, start=start, sized=False)
        )
        bound_s, asked = trust * solution.bound_s, self.request.remat != "auto"
        return Chosen(models, model, solution, level, table.places > 1, asked, bound_s)

    def held_bytes(self, shape: Shape, level: str) -> float:
        """Bytes per device if everything that is held were cut evenly over all devices, and each place kept one
        microbatch."""
        known = self._of_weights.held_bytes
        if level not in known:
            known[level] = least_bytes(
                self.whole.program,
                self.whole.clusters,
                self.whole.joints(roles.nothing, 1),
                self.request.cluster,
                self.request.settings,
                self.whole.levels(level),
            )
        rest = self.rest_bytes / self.request.cluster.devices
        return rest + (known[level] - rest) / shape.microbatches

    @property
    def rest_bytes(self) -> float:
        """Bytes of all parameters with gradients and optimizer state on the device, not divided by the number of
        devices."""
        if self._of_weights.rest_bytes is None:
            self._of_weights.rest_bytes = self._sum_over_parameters(Prices.rest_bytes)
        return self._of_weights.rest_bytes

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer's step, divided evenly over all devices."""
        if self._of_weights.update_s is None:
            self._of_weights.update_s = self._sum_over_parameters(Prices.update_s) / self.request.cluster.devices
        return self._of_weights.update_s

    @property
    def late_s(self) -> float:
        """Seconds that every step takes after its work: those of the update with offloading, else 0."""
        return self.update_s if self.request.settings.offload else 0.0

    def _sum_over_parameters(self, price: Callable[[Prices, Op, Sequence[Option]], float]) -> float:
        """The sum of a price over all parameters, whole on one device."""
        cluster, table = self.request.cluster, self.whole.table(1, placed=False)
        prices = Prices(cluster.line(1).mesh((1,)), cluster.device, self.request.settings)
        return sum(
            price(prices, op, table[op.name][:1]) for op in self.whole.program.ops.values() if op.role == "param"
        )

    def shared(self, microbatches: int) -> Microbatching | None:
        """How so many microbatches share values; None for one.

        Raises PlanError, naming the operator, where they cannot.
        """
        if microbatches == 1:
            return None
        known = self._of_program.shared
        if (
            microbatches not in known
            and self._undivided is not None
            and (entire := self._undivided.shared(microbatches)) is not None
        ):
            known[microbatches] = of_parts(entire, self.whole.program, self.origin)
        if microbatches not in known:
            known[microbatches] = sharing(
                self.whole.program,
                self.whole.clusters,
                self.whole.table(microbatches, placed=False),
                microbatches,
                self.request.cluster,
                self.request.settings,
            )
        return known[microbatches]

    @property
    def barred(self) -> tuple[int, ...]:
        """Where no stage can begin (pipeline.units.barred)."""
        return self._of_program.barred

    def filled(self, costs: Sequence[Cost]) -> tuple[int, ...]:
        """The numbers of the pieces with parameters (in training: trained ones), whose costs are `costs`. Every place
        must have one of them."""
        training = self.request.settings.training
        return tuple(
            number
            for number, (unit, cost) in enumerate(zip(self.units, costs, strict=True))
            if cost.rest_bytes > 0 and (unit.name in self._of_program.trained or not training)
        )

    def crossing(self, plan: Plan, microbatches: int) -> list[tuple[Ref, ...]]:
        """What a cut in front of each piece sends: the same for all plans of this graph."""
        shared = self.shared(microbatches)
        totals = shared.totals if shared is not None else ()
        known = self._of_program.crossing
        if totals not in known:
            known[totals] = crossing(self.whole.program, plan, totals)
        return known[totals]

    @property
    def sharable(self) -> str:
        """Why the batch cannot be cut into microbatches; empty where it can."""
        if self._of_program.sharable is None:
            self._of_program.sharable = self._why_not_sharable()
        return self._of_program.sharable

    def _why_not_sharable(self) -> str:
        if "b" not in self.hints:
            return (
                "no size of the inputs is the batch: none is dim 0 of all of them, or the model fixes it (a note of a "
                "plan without a pipeline says which); name it in dynamic_shapes, 'b' for the dim of samples of each "
                "input that has them (on the command line: let the factory give inputs of one first size)"
            )
        if (groups := sample_groups(self.gm, self.batch)) < 2:
            return "a batch of one sample, or of one group of them, has no microbatches"
        try:
            self.shared(fewest(groups))
        except PlanError as error:
            return str(error)
        return ""
