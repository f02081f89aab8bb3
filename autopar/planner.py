"""What is the same for all meshes: the program, its clusters, their options, prices of operators; and one priced answer on one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from torch import fx

from autopar.cluster import Cluster, Device, Mesh
from autopar.decided import node_plan
from autopar.errors import InfeasibleError
from autopar.memory import predict
from autopar.memory.within import TRIES, within
from autopar.pipeline.alone import step_cost
from autopar.pipeline.passed import Passed
from autopar.plan import Plan, Predicted, Stage
from autopar.problem.branches import Branches
from autopar.problem.branches import find as find_branches
from autopar.problem.build import Decisions, Model, build, rested
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.clusters import Joint, Table, join
from autopar.problem.clusters import build as build_clusters
from autopar.problem.floor import Work
from autopar.problem.graph import Program
from autopar.problem.kernels import Kernels
from autopar.problem.least import least_bytes
from autopar.problem.options import Sections, Tiles, sections_of, table_of, untiled
from autopar.problem.passing import Passing
from autopar.problem.prices import Prices
from autopar.problem.reading import read
from autopar.problem.remat import LEVELS, Levels, levels, rematerialised
from autopar.problem.rerun import rerun
from autopar.problem.shares import ForwardPrices
from autopar.problem.tiling import large
from autopar.problem.types import Cost, Problem, Solution
from autopar.recipes import roles
from autopar.request import Request
from autopar.search import ilp
from autopar.search.tangents import promises, roamed

HONINGS = 3
"""How often a Candidate is honed: again with the room that there is then, or with less where more lives for a moment than before."""

SURE = 0.02
"""Relative: steps that take so much longer than their Problem thinks are compared with others in which less is to hide."""

_On = tuple[Mesh, tuple[roles.Role, ...]]  # a mesh, and what its axes may do
_Key = tuple[_On, tuple[tuple[str, tuple[str, ...]], ...]]  # with the blocks that are run again, and what they keep


@dataclass(eq=False)
class Candidate:
    """One priced answer on one mesh."""

    name: str
    mesh: Mesh
    model: Model
    solution: Solution
    cost: Cost
    remat: Levels = field(default_factory=dict)
    again: Mapping[str, int] = field(default_factory=dict)  # by scope of `remat`: of how many blocks, where that is not all of them
    peak_bytes: float | None = None  # at the peak of its fullest rank, once that was walked
    timed: Callable[[Model, tuple[int, ...]], Cost] = field(default=lambda model, choice: model.problem.evaluate(choice))  # what a solution costs as it runs
    short: bool = False  # whether its Problem has less room than the device, for what lives for a moment only

    @property
    def peak(self) -> float:
        """`peak_bytes` of one that was walked."""
        assert self.peak_bytes is not None, "its memory was not walked"
        return self.peak_bytes

    @property
    def counted_bytes(self) -> float:
        """Bytes per device by its Problem, which knows nothing of what lives for a moment only."""
        return self.model.problem.price(self.solution.choice).memory_bytes

    def refined(self, solution: Solution) -> Candidate:
        """The same problem with another solution; where it is short of room, what that proves does not hold for all plans that fit."""
        proven = replace(solution, bound_s=self.solution.bound_s) if self.short else solution
        return replace(self, solution=proven, cost=self.timed(self.model, solution.choice))

    @property
    def plainly(self) -> Cost:
        """What the same choices cost with nothing run again, whatever memory that takes."""
        return self.timed(self.model.plainly.with_limit(math.inf), self.solution.choice)


@dataclass(eq=False)
class Planner:
    """Everything that is the same for all meshes: the program, its clusters, options by axis size, prices of operators and of their forward."""

    program: Program
    request: Request
    sections: Sections
    clusters: list[OpCluster]
    branches: Branches
    kernels: Kernels
    forward_kernels: Kernels
    tiles: Tiles = untiled
    _tables: dict[tuple[int, bool, bool], Table] = field(default_factory=dict)
    _joints: dict[tuple[roles.Role, int], list[list[Joint]]] = field(default_factory=dict)
    _prices: dict[Mesh, Prices] = field(default_factory=dict)  # by mesh: recipes and the search share them
    _ahead: dict[Mesh, ForwardPrices] = field(default_factory=dict)
    _made: dict[_Key, Model] = field(default_factory=dict)
    on_devices: Planner | None = None  # where something is on the host: the same with all of it on the devices
    _levels: dict[str, Levels] = field(default_factory=dict)
    _work: dict[str, Work] = field(default_factory=dict)
    remat: Levels = field(default_factory=dict)  # the blocks that are run again in all that is priced
    settled: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)  # recipes on meshes that have room to spare: nothing to run again for
    missing_bytes: list[float] = field(default_factory=list)  # per device, of every mesh and recipe that was short of memory

    @staticmethod
    def of(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, planned: Mapping[str, Sequence[str]] | None = None) -> Planner:
        """Read the graph at the planned sizes. The runtime algorithms of `planned` (by node) are among the options, whatever device they were planned for."""
        program = read(gm, hints, training=request.settings.training, device=request.cluster.device.kind)
        for op in program.ops.values():
            op.rules = request.rules
        sections = sections_of(program, request.rules)
        whole = table_of(program, 1, sections, request.rules)
        clusters = build_clusters(program, whole)
        device, settings = request.cluster.device, request.settings
        return Planner(program, request, sections, clusters, find_branches(program, clusters), Kernels(device, settings),
                       Kernels(device, replace(settings, mode="inference")), large(request.limit_bytes, planned or {}))

    def anew(self, request: Request) -> Planner:
        """The same program for another request on the same cluster, with settings that differ at most in what is on the host; what was found so
        far is shared."""
        same = replace(request.settings, offload=self.request.settings.offload) == self.request.settings
        assert same, "operators are priced under other settings"
        other = replace(self, request=request, remat={}, missing_bytes=[], settled=set())
        if request.settings == self.request.settings:
            return other
        assert not self.request.settings.offload, "plans on the host are told from those on devices"
        return replace(other, _prices={}, _made={}, on_devices=self)

    def table(self, ways: int, *, placed: bool, tiled: bool = False) -> Table:
        """Options of every Op on an axis of `ways` ranks, operator placements included where `placed`, large weights in tiles where `tiled`."""
        key = (ways, placed, tiled)
        if key not in self._tables:
            found = table_of(self.program, ways, self.sections, self.request.rules, self.tiles if tiled else untiled)
            self._tables[key] = {name: options + (self.branches.options(self.program.ops[name], ways) if placed else []) for name, options in found.items()}
        return self._tables[key]

    def joints(self, role: roles.Role, ways: int) -> list[list[Joint]]:
        """Options of every cluster on an axis of `ways` ranks with that role; one rank cuts nothing."""
        role = role if ways > 1 else roles.nothing
        if (role, ways) not in self._joints:
            table, allow = self.table(ways, placed=role is roles.anything, tiled=role in roles.GATHERING), role(ways)
            self._joints[role, ways] = [join(cluster, table, allow) for cluster in self.clusters]
        return self._joints[role, ways]

    def cuts_samples(self, ways: int) -> bool:
        """Whether an axis of `ways` ranks can split the inputs by samples."""
        inputs = [i for i, cluster in enumerate(self.clusters) if cluster.root.role == "input"]
        return any(joint.options[-1].split for i in inputs for joint in self.joints(roles.samples, ways)[i])

    def model(self, sizes: tuple[int, ...], used: Sequence[roles.Role], name: str, places: int = 1) -> Model:
        """The Problem of one mesh under one role per axis; with pipeline stages on several `places`, of the whole model on the first."""
        at = self.request.cluster.places(places, sizes)
        return self._model((at.mesh(0), tuple(used)), at.device(0), self.remat).called(name, self.request.limit_bytes)

    def _model(self, on: _On, device: Device, remat: Levels) -> Model:
        """The Problem with the blocks of `remat` run again, made once."""
        key = on, tuple((scope, tuple(names)) for scope, names in remat.items())
        if key not in self._made:
            prices = self._priced(on[0], device)
            if self.on_devices is not None:
                self._made[key] = rested(self.on_devices._model(on, device, remat), prices)
            elif remat:
                forward = self.forward(on[0]) if device == self.kernels.device else ForwardPrices(on[0], device, self.request.settings)
                self._made[key] = rematerialised(self._model(on, device, {}), forward, remat)
            else:
                joints = [self.joints(role, axis.size) for role, axis in zip(on[1], on[0].axes, strict=True)]
                self._made[key] = build(self.program, self.clusters, joints, prices, math.inf, branches=self.branches)
        return self._made[key]

    def _priced(self, mesh: Mesh, device: Device) -> Prices:
        if mesh not in self._prices:
            self._prices[mesh] = Prices(mesh, device, self.request.settings, self.kernels if device == self.kernels.device else None,
                                        bucket_bytes=self.program.bucket_bytes)
        return self._prices[mesh]

    def forward(self, mesh: Mesh) -> ForwardPrices:
        """Prices of the forward alone on a mesh of the device that the kernels are of."""
        if mesh not in self._ahead:
            self._ahead[mesh] = ForwardPrices(mesh, self.kernels.device, self.request.settings, self.forward_kernels)
        return self._ahead[mesh]

    @property
    def open_levels(self) -> tuple[str, ...]:
        """The levels (problem.remat.LEVELS) at which blocks may be run again."""
        free = self.request.remat == "auto" and self.request.settings.training and self.program.runs
        return LEVELS if free else (self.request.remat_level,)

    def levels(self, level: str) -> Levels:
        """What all blocks keep at one of problem.remat.LEVELS, found once."""
        if level not in self._levels:
            self._levels[level] = levels(self.program, level)
        return self._levels[level]

    def again(self, level: str) -> list[str]:
        """The Ops that run forward twice where all blocks are run again at `level`."""
        return [name for scope, names in self.levels(level).items() for name in rerun(self.program, scope, names).again]

    def work(self, level: str) -> Work:
        """The least work of a step with all blocks run again at `level`, found once."""
        if level not in self._work:
            self._work[level] = Work.of(self.program, self.request.cluster.device, self.request.settings, self.again(level))
        return self._work[level]

    def least_bytes(self) -> float:
        """Bytes per device without which no plan of one stage and one microbatch can be."""
        return least_bytes(self.program, self.clusters, self.joints(roles.nothing, 1), self.request.cluster, self.request.settings, self.remat)

    def candidate(self, sizes: tuple[int, ...], used: Sequence[roles.Role], name: str,
                  solve: Callable[[Problem], Solution], cutoff_s: float = math.inf) -> Candidate:
        """Solve one mesh. Raises InfeasibleError when nothing fits, what lives for a moment counted too; that is not counted where
        nothing faster than `cutoff_s` can be, and the answer is not as it runs either, in which more may hide than its Problem knows."""
        model, mesh = self.model(sizes, used, name), self.request.cluster.mesh(sizes)

        forward = self.forward(mesh)
        bounds: list[float] = []  # the first one holds for all plans that fit, the next ones only where there is less room

        def solved(limit_bytes: float) -> Candidate:
            here = model.with_limit(limit_bytes)
            solution = solve(here.problem)
            bounds.append(solution.bound_s)
            timed = partial(step_cost, forward=forward)
            cost, proven = timed(here, solution.choice), replace(solution, bound_s=bounds[0])
            found = Candidate(name, mesh, here, proven, cost, remat=self.remat, timed=timed, short=len(bounds) > 1)
            return found if min(bounds[0], cost.time_s) >= cutoff_s else self.counted(found)

        peaks: list[float] = []

        def peak_bytes(found: Candidate) -> float:
            peaks.append(found.peak_bytes or 0.0)
            return peaks[-1]

        tries = 2 * TRIES if self.tiling(sizes, used) else TRIES
        try:
            found = within(self.request.limit_bytes, solved, peak_bytes, tries, counted_bytes=lambda found: found.counted_bytes)
        except InfeasibleError as error:
            self.missing_bytes += [error.missing_bytes] if error.missing_bytes is not None else []
            error.bound_s = min(bounds[:1], default=error.bound_s)
            raise
        self.missing_bytes += [peaks[0] - self.request.limit_bytes] if found.short else []
        return found

    def wary(self, found: Candidate, below_s: float, time_limit_s: float) -> Candidate:
        """A Candidate, or where its step takes longer than its Problem thinks, in which more hides than does, the answer of the same with nothing hidden, if that takes
        less and fits: but for the starts of buckets it takes no longer than those prices say. That is only looked for where it may take less than `below_s`."""
        problem, step_s = found.model.problem, found.cost.time_s
        if found.peak_bytes is None or step_s <= problem.price(found.solution.choice).time_s * (1 + SURE):
            return found
        shown, cutoff_s = problem.shown(), min(step_s, below_s)
        try:
            first = ilp.glance(shown, time_limit_s=time_limit_s, cutoff_s=cutoff_s)
        except InfeasibleError:
            return found
        if first.bound_s >= cutoff_s:
            return found
        best = ilp.search(shown, time_limit_s=time_limit_s, seed=self.request.seed, start=first.choice, cutoff_s=cutoff_s, gap=SURE)
        other = found.refined(replace(found.solution, choice=best.choice, optimal=False))
        return other if other.cost.time_s < step_s and self.counted(other).peak <= self.request.limit_bytes else found

    def tiling(self, sizes: tuple[int, ...], used: Sequence[roles.Role]) -> bool:
        """Whether some weight may be gathered in tiles, of which a Problem counts less than is there for a moment."""
        return any(role in roles.GATHERING and self.tiles(op, ways) for role, ways in zip(used, sizes, strict=True) for op in self.program.ops.values())

    def honed(self, found: Candidate, late: Callable[[], bool]) -> Candidate:
        """The choices of a Candidate that fits, or those that descent by the price of a step (search.tangents) makes of them, where these fit; it ends early where it is `late`."""
        limit_bytes, forward = self.request.limit_bytes, self.forward(found.mesh)
        if found.model.prices.overlap == 0.0:
            return found  # nothing hides, so that its Problem has the seconds of a step
        model, more_bytes = found.model.with_limit(limit_bytes), 0.0
        state = self._state(found)
        price_s = cache(lambda choice: step_cost(model, choice, forward).time_s)  # what is near is asked for again with other room
        state.limit_bytes = -math.inf
        for _ in range(HONINGS):
            start, before_bytes = found.solution.choice, state.limit_bytes
            held_bytes = model.problem.price(start).memory_bytes
            # as much as now lives for a moment only, or more
            state.limit_bytes = max(held_bytes, limit_bytes - max(0.0, found.peak - held_bytes) - more_bytes)
            if more_bytes == 0.0 and state.limit_bytes <= before_bytes:
                break  # it came of as much room
            choice, seconds = roamed(state, start, price_s, late)
            if seconds >= found.cost.time_s:
                break
            made = self.counted(replace(found, model=model).refined(replace(found.solution, choice=choice, optimal=False)))
            if made.peak <= limit_bytes:
                found = made
            else:
                more_bytes += made.peak - limit_bytes
        return found

    def promises(self, found: Candidate, below_s: float) -> bool:
        """Whether a Candidate that fits, honed, may take less than so many seconds."""
        if found.model.prices.overlap == 0.0:
            return False
        state = self._state(found)
        state.limit_bytes = self.request.limit_bytes
        return promises(state, found.solution.choice, below_s)

    def _state(self, found: Candidate) -> Passed:
        """The passes of a Candidate's choices."""
        return Passed(Passing(found.model.with_limit(self.request.limit_bytes), self.forward(found.mesh), late=False), found.solution.choice)

    def counted(self, found: Candidate) -> Candidate:
        """With the bytes at the peak of its fullest rank."""
        made = bare_plan(self, found.mesh, found.model.decode(found.solution.choice), found.name, found.remat, found.again)
        found.peak_bytes = predict(self.program, made).peak_bytes
        return found


def bare_plan(planner: Planner, mesh: Mesh, decisions: Decisions, strategy: str, remat: Levels | None = None, again: Mapping[str, int] | None = None,
              cluster: Cluster | None = None) -> Plan:
    """A plan of these decisions, with the blocks of `remat` run again, or of some scopes as many as `again` says, on the cluster that was asked for or `cluster`, which has its parts in
    another order; without a prediction, the model's name and the graph's hash."""
    request, ops = planner.request, planner.program.ops
    return Plan(
        model="", graph_hash="", mode=request.settings.mode, precision=request.settings.precision, optimizer=request.settings.optimizer,
        offload=request.settings.offload,
        hints=dict(planner.program.hints), cluster=(cluster or request.cluster).to_dict(), axes=tuple(a.name for a in mesh.axes),
        mesh=tuple(a.size for a in mesh.axes), strategy=strategy, seed=request.seed,
        nodes={name: node_plan(ops[name], decisions[name]) for name in ops}, predicted=Predicted(0.0, 0.0, 0.0, 0.0, 0.0),
        remat={scope: tuple(names) for scope, names in (remat or {}).items()}, stages=(Stage(again=dict(again or {})),))
