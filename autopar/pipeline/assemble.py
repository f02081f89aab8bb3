"""A plan of one stage, cut into stages and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError, PlanError
from autopar.pipeline.microbatches import Microbatching
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.stage_views import total_ref
from autopar.pipeline.units import stages_of
from autopar.plan import Plan
from autopar.problem.graph import Program


def pipelined(
    plan: Plan,
    program: Program,
    bounds: Sequence[int],
    schedule: str,
    places: int,
    micro: Microbatching | None,
    microbatches: int,
) -> Plan:
    """`plan`, whose mesh is that of one place, with stages between `bounds` (see units.stages_of) under `schedule`.

    `micro` says how microbatches share values; None for one microbatch. Raises PlanError for an unknown schedule, and
    where stages, places and microbatches do not go together.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"unknown schedule {schedule!r}; known are {', '.join(SCHEDULES)}")
    if schedule == "naive" and microbatches > 1:
        raise PlanError(f"schedule naive runs one microbatch, got {microbatches}; use gpipe or 1f1b")
    if (micro is None) != (microbatches == 1):
        raise PlanError(f"{microbatches} microbatches need to know how they share values")
    totals = micro.totals if micro is not None else ()
    stages = stages_of(program, bounds, SCHEDULES[schedule], places, [total_ref(text) for text in totals])
    nodes = plan.nodes
    if micro is not None:
        nodes = {name: replace(node, micro=micro.entries[name]) for name, node in nodes.items()}
    return replace(
        plan,
        nodes=nodes,
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        totals=totals,
        shared=micro.shared if micro is not None else (),
    )


def check_trained(program: Program, plan: Plan) -> None:
    """Raises InfeasibleError where a place would have no parameter to train: torch's optimizers refuse to have none."""
    if plan.mode != "train":
        return
    for place in range(plan.places):
        mine = {name for stage in plan.stages if stage.place == place for name in (*stage.nodes, *stage.blocks)}
        if plan.stages and not mine & program.trained:
            raise InfeasibleError(
                f"place {place} would have nothing to train ({', '.join(sorted(mine)[:3])}); use fewer places, or a "
                "recipe without a pipeline"
            )
