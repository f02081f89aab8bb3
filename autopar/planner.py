"""The Planner: what all meshes have in common (the program, its clusters and their options, prices of operators), and
the pricing of one mesh. Used by onestage, and by joint for the graph at the sizes of the batch and of microbatches.

A Candidate is one solution on one mesh, with its price and its peak of memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from torch import fx

from autopar.bare_plan import laid
from autopar.candidate import Candidate
from autopar.cluster import Device, Mesh
from autopar.errors import InfeasibleError
from autopar.memory import predict
from autopar.memory.plans_that_fit import TRIES, within
from autopar.pipeline.honing_state import HoningState
from autopar.pipeline.single_stage import step_cost
from autopar.problem.branches import Branches
from autopar.problem.branches import find as find_branches
from autopar.problem.build import Model, build, rested
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.clusters import Joint, Table, join
from autopar.problem.clusters import build as build_clusters
from autopar.problem.graph import Program
from autopar.problem.kernels import Kernels
from autopar.problem.memory_floor import least_bytes
from autopar.problem.options import Sections, Tiles, sections_of, table_of, untiled
from autopar.problem.pass_tables import PassTables
from autopar.problem.prices import Prices
from autopar.problem.read_graph import read
from autopar.problem.remat import LEVELS, Levels, levels, rematerialised
from autopar.problem.rerun import rerun
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.tiling import large
from autopar.problem.time_floor import Work
from autopar.problem.types import Problem, Solution
from autopar.recipes import roles
from autopar.request import Request
from autopar.search import ilp
from autopar.search.tangents import promises, roamed
from passes.part_runs import Parts, part_runs

HONINGS = 3
"""Rounds of honing a Candidate at most: another one where the new choices leave more room in memory, or have larger
temporaries and did not fit."""

SURE = 0.02
"""Relative: where a step takes longer than by its Problem's prices by more than this, choices with less communication
to hide are tried too."""

WARY_GAP = 0.005
"""Relative: how close to the optimum such choices are solved."""

_On = tuple[Mesh, tuple[roles.Role, ...]]  # a mesh, and the role of each of its axes
_Key = tuple[_On, tuple[tuple[str, tuple[str, ...]], ...]]  # with the blocks that are run again, and what they keep


@dataclass(eq=False)
class Planner:
    """Everything that is the same for all meshes, found once: the program, its clusters, options by axis size, prices
    of operators.

    `remat` is the one field that callers set: the rematerialisation under which everything is priced from then on.
    """

    gm: fx.GraphModule
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
    # where the request offloads to the host: the planner of the same without offloading
    on_devices: Planner | None = None
    _levels: dict[str, Levels] = field(default_factory=dict)
    _work: dict[str, Work] = field(default_factory=dict)
    # the blocks that are run again, and what they keep, in all that is priced
    remat: Levels = field(default_factory=dict)
    # (recipe, mesh) that are not short of memory: more rematerialisation gains nothing
    settled: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    # per device over the limit, for every mesh and recipe that was short of memory
    missing_bytes: list[float] = field(default_factory=list)
    _parted: dict[str, Planner] = field(default_factory=dict)
    # by what is offloaded: no mesh has a faster step than this, however much memory there is (onestage)
    roomy_s: dict[str, float] = field(default_factory=dict)
    _passing: tuple[Model, PassTables] | None = None  # the last that were made (`_pass_tables`)

    @staticmethod
    def of(
        gm: fx.GraphModule,
        hints: Mapping[str, int],
        request: Request,
        planned: Mapping[str, Sequence[str]] | None = None,
    ) -> Planner:
        """Read the graph at the planned sizes `hints`. The runtime algorithms that an existing plan uses (`planned`, by
        node) are among the options, also where this device would not be offered them."""
        program = read(gm, hints, training=request.settings.training, device=request.cluster.device.kind)
        for op in program.ops.values():
            op.rules = request.rules
        sections = sections_of(program, request.rules)
        whole = table_of(program, 1, sections, request.rules)
        clusters = build_clusters(program, whole)
        device, settings = request.cluster.device, request.settings
        return Planner(
            gm,
            program,
            request,
            sections,
            clusters,
            find_branches(program, clusters),
            Kernels(device, settings),
            Kernels(device, replace(settings, mode="inference")),
            large(request.limit_bytes, planned or {}),
        )

    def anew(self, request: Request) -> Planner:
        """The same program for another request on the same cluster; caches are shared. Its settings may differ in
        `offload` only."""
        same = replace(request.settings, offload=self.request.settings.offload) == self.request.settings
        assert same, "operators are priced under other settings"
        other = replace(self, request=request, remat={}, missing_bytes=[], settled=set(), _parted={}, _passing=None)
        if request.settings == self.request.settings:
            return other
        assert not self.request.settings.offload, "plans on the host are told from those on devices"
        return replace(other, _prices={}, _made={}, on_devices=self)

    def parted(self, parts: Parts) -> Planner:
        """The same with runs of blocks divided into `parts` (Plan.parted), made once."""
        key = json.dumps(parts)
        if parts and key not in self._parted:
            made = Planner.of(part_runs(self.gm, parts), self.program.hints, self.request)
            self._parted[key] = replace(made, tiles=self.tiles)
        return self._parted[key] if parts else self

    def table(self, ways: int, *, placed: bool, tiled: bool = False) -> Table:
        """Options of every Op on an axis of `ways` ranks; with operator placements if `placed`, with weights gathered
        in tiles if `tiled`."""
        key = (ways, placed, tiled)
        if key not in self._tables:
            found = table_of(self.program, ways, self.sections, self.request.rules, self.tiles if tiled else untiled)
            self._tables[key] = {
                name: options + (self.branches.options(self.program.ops[name], ways) if placed else [])
                for name, options in found.items()
            }
        return self._tables[key]

    def joints(self, role: roles.Role, ways: int) -> list[list[Joint]]:
        """Options of every cluster on an axis of `ways` ranks that a role allows; on an axis of one rank nothing is
        cut, whatever the role."""
        role = role if ways > 1 else roles.nothing
        if (role, ways) not in self._joints:
            placed = isinstance(role, roles.Free) and not role.by_sample
            table, allow = self.table(ways, placed=placed, tiled=roles.gathers(role)), role(ways)
            self._joints[role, ways] = [join(cluster, table, allow) for cluster in self.clusters]
        return self._joints[role, ways]

    def cuts_samples(self, ways: int) -> bool:
        """Whether an axis of `ways` ranks can split the inputs by samples."""
        inputs = [i for i, cluster in enumerate(self.clusters) if cluster.root.role == "input"]
        return any(joint.options[-1].split for i in inputs for joint in self.joints(roles.samples, ways)[i])

    def model(self, sizes: tuple[int, ...], used: Sequence[roles.Role], name: str, places: int = 1) -> Model:
        """The Problem of one mesh with one role per axis, under `remat` and the request's memory limit. With several
        pipeline `places`: of the whole model on the devices of the first place."""
        at = self.request.cluster.places(places, sizes)
        return self._model((at.mesh(0), tuple(used)), at.device(0), self.remat).called(name, self.request.limit_bytes)

    def _model(self, on: _On, device: Device, remat: Levels) -> Model:
        """The Problem under `remat` without a memory limit, made once. Offloading and rematerialisation are changes of
        the plain Problem."""
        key = on, tuple((scope, tuple(names)) for scope, names in remat.items())
        if key not in self._made:
            prices = self._priced(on[0], device)
            if self.on_devices is not None:
                self._made[key] = rested(self.on_devices._model(on, device, remat), prices)
            elif remat:
                forward = (
                    self.forward(on[0])
                    if device == self.kernels.device
                    else ForwardPrices(on[0], device, self.request.settings)
                )
                self._made[key] = rematerialised(self._model(on, device, {}), forward, remat)
            else:
                joints = [self.joints(role, axis.size) for role, axis in zip(on[1], on[0].axes, strict=True)]
                self._made[key] = build(self.program, self.clusters, joints, prices, math.inf, branches=self.branches)
        return self._made[key]

    def _priced(self, mesh: Mesh, device: Device) -> Prices:
        """Prices of operators and collectives on a mesh of `device`, made once."""
        if mesh not in self._prices:
            self._prices[mesh] = Prices(
                mesh,
                device,
                self.request.settings,
                self.kernels if device == self.kernels.device else None,
                bucket_bytes=self.program.bucket_bytes,
            )
        return self._prices[mesh]

    def forward(self, mesh: Mesh) -> ForwardPrices:
        """Prices of the forward alone on a mesh of `kernels.device`."""
        if mesh not in self._ahead:
            self._ahead[mesh] = ForwardPrices(mesh, self.kernels.device, self.request.settings, self.forward_kernels)
        return self._ahead[mesh]

    @property
    def open_levels(self) -> tuple[str, ...]:
        """The levels of rematerialisation (problem.remat.LEVELS) that the request leaves open."""
        free = self.request.remat == "auto" and self.request.settings.training and self.program.runs
        return LEVELS if free else (self.request.remat_level,)

    def levels(self, level: str) -> Levels:
        """By scope of blocks, what they keep at one of problem.remat.LEVELS; found once."""
        if level not in self._levels:
            self._levels[level] = levels(self.program, level)
        return self._levels[level]

    def again(self, level: str) -> list[str]:
        """The Ops whose forward runs twice where all blocks are run again at `level`."""
        return [name for scope, names in self.levels(level).items() for name in rerun(self.program, scope, names).again]

    def work(self, level: str) -> Work:
        """The least work of a step with all blocks run again at `level`, found once."""
        if level not in self._work:
            self._work[level] = self.work_on(self.request.cluster.device, self.again(level))
        return self._work[level]

    def work_on(self, device: Device, again: Collection[str] = ()) -> Work:
        """The least work of a step on devices of one kind, where the operators of `again` run forward twice."""
        return Work.of(self.program, self.branches, device, self.request.settings, again)

    def least_bytes(self) -> float:
        """Bytes per device that every plan of one stage and one microbatch needs, under `remat`."""
        return least_bytes(
            self.program,
            self.clusters,
            self.joints(roles.nothing, 1),
            self.request.cluster,
            self.request.settings,
            self.remat,
        )

    def candidate(
        self,
        sizes: tuple[int, ...],
        used: Sequence[roles.Role],
        name: str,
        solve: Callable[[Problem], Solution],
        cutoff_s: float = math.inf,
    ) -> Candidate:
        """Solve one mesh: the best Candidate whose peak, temporaries included, is within the limit.

        The Problem does not count temporaries, so it is solved again with a lower limit while the peak is too high
        (memory.plans_that_fit). Memory is not walked (`peak_bytes` stays None) where neither the proven bound nor the
        answer's own step time is below `cutoff_s`. Raises InfeasibleError when nothing fits.
        """
        model, mesh = self.model(sizes, used, name), self.request.cluster.mesh(sizes)

        forward = self.forward(mesh)
        bounds: list[float] = []  # the first one holds for all plans that fit, the others only under a lower limit

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
            found = within(
                self.request.limit_bytes, solved, peak_bytes, tries, counted_bytes=lambda found: found.counted_bytes
            )
        except InfeasibleError as error:
            self.missing_bytes += [error.missing_bytes] if error.missing_bytes is not None else []
            error.bound_s = min(bounds[:1], default=error.bound_s)
            raise
        self.missing_bytes += [peaks[0] - self.request.limit_bytes] if found.short else []
        return found

    def wary(self, found: Candidate, below_s: float, time_limit_s: float) -> Candidate:
        """`found`, or a faster Candidate that relies less on overlap.

        Where a step takes longer than its Problem says (SURE), the Problem let more communication hide than does. The
        same Problem with all communication exposed is an upper bound on the step, but for the starts of buckets; its
        solution replaces `found` where it is faster and fits. It is only looked for where it may take less than
        `below_s`.
        """
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
        best = ilp.search(
            shown,
            time_limit_s=time_limit_s,
            seed=self.request.seed,
            start=first.choice,
            cutoff_s=cutoff_s,
            gap=WARY_GAP,
        )
        other = found.refined(replace(found.solution, choice=best.choice, optimal=False))
        return other if other.cost.time_s < step_s and self.counted(other).peak <= self.request.limit_bytes else found

    def tiling(self, sizes: tuple[int, ...], used: Sequence[roles.Role]) -> bool:
        """Whether some weight may be gathered in tiles: the peak then exceeds what the Problem counts by more than
        usual."""
        return any(
            roles.gathers(role) and self.tiles(op, ways)
            for role, ways in zip(used, sizes, strict=True)
            for op in self.program.ops.values()
        )

    def honed(self, found: Candidate, late: Callable[[], bool]) -> Candidate:
        """`found`, which fits, improved by descent on the price of a step as it runs (search.tangents), as long as that
        fits; ends early once `late`."""
        limit_bytes, forward = self.request.limit_bytes, self.forward(found.mesh)
        if found.model.prices.overlap == 0.0:
            return found  # nothing overlaps, so the Problem's prices are those of the step
        model, more_bytes = found.model.with_limit(limit_bytes), 0.0
        state = self._state(found)
        # rounds with other limits ask for the same choices again
        price_s = cache(lambda choice: step_cost(model, choice, forward).time_s)
        state.limit_bytes = -math.inf
        for _ in range(HONINGS):
            start, before_bytes = found.solution.choice, state.limit_bytes
            held_bytes = model.problem.price(start).memory_bytes
            # leaves as much room as the temporaries take now, and what they took too much in a round before
            state.limit_bytes = max(held_bytes, limit_bytes - max(0.0, found.peak - held_bytes) - more_bytes)
            if more_bytes == 0.0 and state.limit_bytes <= before_bytes:
                break  # the round before had at least as much room
            choice, seconds = roamed(state, start, price_s, late)
            if seconds >= found.cost.time_s:
                break
            made = self.counted(
                replace(found, model=model).refined(replace(found.solution, choice=choice, optimal=False))
            )
            if made.peak <= limit_bytes:
                found = made
            else:
                more_bytes += made.peak - limit_bytes
        return found

    def promises(self, found: Candidate, below_s: float) -> bool:
        """Whether honing a Candidate that fits may lead below `below_s`."""
        if found.model.prices.overlap == 0.0:
            return False
        state = self._state(found)
        state.limit_bytes = self.request.limit_bytes
        return promises(state, found.solution.choice, below_s)

    def _state(self, found: Candidate) -> HoningState:
        """The state of the descent: a Candidate's choices, priced pass by pass (forward and backward)."""
        return HoningState(self._pass_tables(found), found.solution.choice)

    def _pass_tables(self, found: Candidate) -> PassTables:
        """The tables of a Candidate's passes; where it is asked first what honing promises, they are made once."""
        if self._passing is None or self._passing[0] is not found.model:
            model = found.model.with_limit(self.request.limit_bytes)
            self._passing = found.model, PassTables(model, self.forward(found.mesh), sums_at_end=False)
        return self._passing[1]

    def counted(self, found: Candidate) -> Candidate:
        """`found`, with its `peak_bytes` walked."""
        made = laid(self, found)
        found.peak_bytes = predict(self.parted(made.parted).program, made).peak_bytes
        return found
