"""Step time against memory, as a table and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from autopar.plan import Plan
from autopar.report.grid import grid
from autopar.text import gibibytes, seconds


def frontier(plans: Sequence[Plan]) -> Table:
    """One row per plan, the fastest first."""
    table = grid(
        "step time against memory per device",
        "step",
        "memory",
        "strategy",
        "places",
        "mesh",
        "schedule",
        "microbatches",
        "run again",
    )
    for plan in plans:
        about = plan.predicted
        table.add_row(
            seconds(about.step_s),
            gibibytes(about.memory_bytes),
            plan.strategy,
            str(plan.places),
            "x".join(map(str, plan.mesh)),
            plan.schedule if plan.places > 1 else "",
            str(plan.microbatches),
            ", ".join(plan.remat),
        )
    return table


def point(plan: Plan) -> dict[str, Any]:
    """One row as data: seconds and bytes."""
    return {
        "step_s": plan.predicted.step_s,
        "memory_bytes": plan.predicted.memory_bytes,
        "strategy": plan.strategy,
        "places": plan.places,
        "mesh": list(plan.mesh),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "remat": list(plan.remat),
        "offload": plan.offload,
    }
