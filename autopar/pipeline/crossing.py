"""What a cut in front of each piece of a program sends to the next stage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.stage_views import total_ref, views
from autopar.pipeline.units import stages_of, units
from autopar.plan import Plan
from autopar.problem.graph import Program, Ref


def crossing(program: Program, plan: Plan, totals: Collection[str]) -> list[tuple[Ref, ...]]:
    """For each of `units(program)` the values that cross a cut in front of it, whatever the layouts of `plan`: what
    every piece as a stage of its own receives. `totals` are the values that all stages are given."""
    count = len(units(program))
    schedule = SCHEDULES["1f1b"]
    stages = stages_of(program, range(1, count), schedule, count, [total_ref(text) for text in totals])
    return [
        view.receives
        for view in views(program, replace(plan, stages=stages, schedule=schedule.name, totals=tuple(totals)))
    ]
