"""A plan with the mesh, stages, microbatches and recomputation of a given configuration; a search chooses the layouts
that these leave open (predict.layouts)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.bare_plan import bare_plan
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.pipeline.assemble import pipelined
from autopar.pipeline.microbatch_splits import sharing
from autopar.pipeline.units import units
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.graph import Program
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.request import Request
from benchmarks.costmodel.predict.axes import axes, rerun_levels
from benchmarks.costmodel.predict.layouts import fastest_layouts
from benchmarks.costmodel.predict.setup import Setup
from benchmarks.costmodel.predict.sizes import sizes

ROUNDS = 3
"""With so many microbatches per place an interleaved pipeline is full: more of them keep no more in flight."""


@dataclass(frozen=True)
class Given:
    """A plan, and the program that it is for, at the sizes of the plan's whole batch."""

    program: Program
    plan: Plan


def given_plan(gm: fx.GraphModule, setup: Setup, cluster: Cluster, precision: str) -> Given:
    """The plan of a configuration of a captured model, all its blocks in the graph. `precision` as Settings has it.

    The plan is for its memory: it has only as many microbatches as fill the pipeline, since more of them do not change
    the peak. Raises PlanError where the configuration cannot be planned (stages without a block, a batch that
    microbatches do not divide, heads that tensor-parallel ranks do not divide).
    """
    kept = replace(setup, microbatches=_filling(setup), flushes=1)
    used = axes(kept)
    ways = tuple(axis.ways for axis in used)
    settings = Settings("train", "adamw", precision)
    place = cluster.line(math.prod(ways) * kept.pp)
    planner = Planner.of(
        gm, sizes(gm, kept.micro_batch * kept.dp * kept.microbatches, kept.seq), Request(place, settings)
    )
    mesh = place.places(kept.pp, ways).mesh(0)
    decisions = fastest_layouts(planner, Prices(mesh, place.device, settings, planner.kernels), used)
    flat = bare_plan(planner, mesh, decisions, "given", rerun_levels(planner.program, kept))
    return Given(planner.program, _staged(planner, flat, kept))


def _filling(setup: Setup) -> int:
    """A number of microbatches, at most those of `setup`, that fills the pipeline."""
    if setup.pp == 1:
        return min(setup.microbatches, 2)
    if setup.vpp > 1:
        return min(-(-setup.at_once // setup.pp), ROUNDS) * setup.pp
    return min(setup.at_once, 2 * setup.pp)


def _staged(planner: Planner, flat: Plan, setup: Setup) -> Plan:
    """`flat`, a plan of one stage and one microbatch, cut into the stages and microbatches of `setup`."""
    request, count = planner.request, setup.microbatches
    micro = (
        sharing(
            planner.program,
            planner.clusters,
            planner.table(count, placed=False),
            count,
            request.cluster,
            request.settings,
        )
        if count > 1
        else None
    )
    if setup.pp == 1 and count == 1:
        return _partly_rerun(flat, setup)
    made = pipelined(flat, planner.program, bounds(planner.program, setup), _schedule(setup), setup.pp, micro, count)
    return _partly_rerun(made, setup)


def _partly_rerun(made: Plan, setup: Setup) -> Plan:
    """`made` with only some of the blocks of each stage run again, where the configuration says so (`again`,
    `recompute_share`)."""
    if not made.remat or (not setup.again and setup.recompute_share == 1.0):
        return made
    stages = []
    for index, stage in enumerate(made.stages):
        counts = {scope: stop - first for scope, (first, stop) in stage.blocks.items()}
        wanted = {
            scope: min(n, setup.again[index]) if setup.again else round(n * setup.recompute_share)
            for scope, n in counts.items()
        }
        stages.append(replace(stage, again=wanted))
    return replace(made, stages=tuple(stages))


def _schedule(setup: Setup) -> str:
    """The name of the schedule: that of `setup` if it has one, else by stages per place and microbatches."""
    if setup.schedule:
        return setup.schedule
    if setup.vpp > 1:
        return "interleaved_1f1b"
    if setup.microbatches >= setup.pp:
        return "1f1b"
    return "gpipe" if setup.microbatches > 1 else "naive"


def bounds(program: Program, setup: Setup) -> Sequence[int]:
    """The number of the unit at which each stage but the first begins. Units before all blocks go to the first stage,
    those after them to the last. Raises PlanError where a stage has no block."""
    pieces = units(program)
    blocks = [at for at, unit in enumerate(pieces) if unit.instance >= 0]
    dealt = setup.blocks_of(len(blocks))
    if min(dealt) < 1:
        raise PlanError(
            f"{len(blocks)} blocks cannot be dealt to {len(dealt)} stages as {dealt}: every stage needs one"
        )
    return [blocks[sum(dealt[:stage])] for stage in range(1, len(dealt))]
