"""A plan of a given configuration: its mesh, stages, microbatches and recomputation as stated, the search for what they leave open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.pipeline.assemble import pipelined
from autopar.pipeline.microbatch_splits import sharing
from autopar.pipeline.units import units
from autopar.plan import Plan
from autopar.planner import Planner, bare_plan
from autopar.predict.axes import axes, rerun_levels
from autopar.predict.refused import check_cut
from autopar.predict.setup import Setup
from autopar.predict.sizes import sizes
from autopar.problem.build import build
from autopar.problem.graph import Program
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.request import Request
from autopar.search import ilp

SOLVE_S = 5.0
NO_LIMIT_BYTES = float(1 << 60)
"""A given configuration is planned whether it fits or not."""

ROUNDS = 3
"""After so many rounds of microbatches every pipeline is full, and keeps no more in later ones."""


@dataclass(frozen=True)
class Given:
    """A plan with the program that it is for, read at the sizes of the plan's whole batch."""

    program: Program
    plan: Plan


def given_plan(gm: fx.GraphModule, setup: Setup, cluster: Cluster, precision: str) -> Given:
    """The plan of a configuration of a captured model, all its blocks in the graph. `precision` as Settings has it.

    Microbatches behind the first few rounds of a pipeline are left out: they take what those before them took. Raises PlanError where
    the configuration cannot be planned (stages without a block, a batch that cannot be cut, heads that tensor-parallel ranks do not divide).
    """
    kept = replace(setup, microbatches=_few(setup), flushes=1)
    used = axes(kept)
    ways = tuple(axis.ways for axis in used)
    settings = Settings("train", "adamw", precision)
    place = cluster.line(math.prod(ways) * kept.pp)
    planner = Planner.of(gm, sizes(gm, kept.micro_batch * kept.dp * kept.microbatches, kept.seq), Request(place, settings))
    mesh = place.places(kept.pp, ways).mesh(0)
    joints = [planner.joints(axis.role, axis.ways) for axis in used]
    model = build(planner.program, planner.clusters, joints, Prices(mesh, place.device, settings, planner.kernels), NO_LIMIT_BYTES, "given")
    decisions = model.decode(ilp.search(model.problem, time_limit_s=SOLVE_S).choice)
    check_cut(planner.program, decisions, used)
    flat = bare_plan(planner, mesh, decisions, "given", rerun_levels(planner.program, kept))
    return Given(planner.program, _staged(planner, flat, kept))


def _few(setup: Setup) -> int:
    """So many microbatches that every pipeline is full."""
    if setup.pp == 1:
        return min(setup.microbatches, 2)
    if setup.vpp > 1:
        return min(-(-setup.at_once // setup.pp), ROUNDS) * setup.pp
    return min(setup.at_once, 2 * setup.pp)


def _staged(planner: Planner, flat: Plan, setup: Setup) -> Plan:
    """`flat` cut into the stages and microbatches of `setup`."""
    request, count = planner.request, setup.microbatches
    micro = sharing(planner.program, planner.clusters, planner.table(count, placed=False), count, request.cluster, request.settings) if count > 1 else None
    if setup.pp == 1 and count == 1:
        return _again(flat, setup)
    made = pipelined(flat, planner.program, bounds(planner.program, setup), _schedule(setup), setup.pp, micro, count)
    return _again(made, setup)


def _again(made: Plan, setup: Setup) -> Plan:
    """With only some of the blocks of each stage run again, where the configuration says so."""
    if not made.remat or (not setup.again and setup.recompute_share == 1.0):
        return made
    stages = []
    for index, stage in enumerate(made.stages):
        counts = {scope: stop - first for scope, (first, stop) in stage.blocks.items()}
        wanted = {scope: min(n, setup.again[index]) if setup.again else round(n * setup.recompute_share) for scope, n in counts.items()}
        stages.append(replace(stage, again=wanted))
    return replace(made, stages=tuple(stages))


def _schedule(setup: Setup) -> str:
    if setup.schedule:
        return setup.schedule
    if setup.vpp > 1:
        return "interleaved_1f1b"
    if setup.microbatches >= setup.pp:
        return "1f1b"
    return "gpipe" if setup.microbatches > 1 else "naive"


def bounds(program: Program, setup: Setup) -> Sequence[int]:
    """Where the stages of `setup` begin among the units of a program: what is before the blocks goes to the first stage, what is behind
    to the last."""
    pieces = units(program)
    blocks = [at for at, unit in enumerate(pieces) if unit.instance >= 0]
    dealt = setup.blocks_of(len(blocks))
    if min(dealt) < 1:
        raise PlanError(f"{len(blocks)} blocks cannot be dealt to {len(dealt)} stages as {dealt}: every stage needs one")
    return [blocks[sum(dealt[:stage])] for stage in range(1, len(dealt))]
