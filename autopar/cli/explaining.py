"""`autopar explain`: the price of each alternative of one node, or what costs most and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from autopar.cli.console import progress, show, write_json
from autopar.cli.rebuild import problem, rebuild
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.report import explain as why
from autopar.report.grid import grid
from autopar.report.reshards import ROLES, reshards
from autopar.report.reshards import Row as Reshard
from autopar.text import gibibytes, seconds

SHOWN = 10  # rows of a table


def explain_command(where: Path, node: str | None, json: str | None) -> None:
    """Print the alternatives of `node`, or without one the most expensive nodes and reshards."""
    with progress(f"explaining {where}") as tell:
        rebuilt = rebuild(where, tell)
        planner, model = problem(rebuilt)
        choice = why.choice_of(model, rebuilt.plan)
        priced_s = model.problem.price(choice).time_s
        rows = why.explain(model, choice, node) if node is not None else []
        parts = why.parts(model, choice, SHOWN) if node is None else []
        moved = sorted(reshards(planner.program, rebuilt.plan), key=lambda row: (-row.step_s, row.tensor))[:SHOWN]
    if node is not None:
        cluster = model.clusters[why.find(model, node)]
        held = [op.name for op in cluster.members]
        found = {"node": node, "decided_with": held, "alternatives": [asdict(row) for row in rows]}
        if not write_json(json, found | _prices(rebuilt.plan, priced_s)):
            show(
                _alternatives(f"{node} ({cluster.root.where or cluster.name})", rows, rebuilt.plan),
                "",
                f"decided together: {', '.join(held)}",
                *_whose(rebuilt.plan, priced_s),
            )
    elif not write_json(
        json,
        {"nodes": [asdict(part) for part in parts], "reshards": [asdict(row) for row in moved]}
        | _prices(rebuilt.plan, priced_s),
    ):
        show(
            _nodes(parts),
            "",
            _reshards(moved),
            "",
            *_whose(rebuilt.plan, priced_s),
            "the alternatives of one node: autopar explain PLAN --node NAME",
        )


def _prices(plan: Plan, priced_s: float) -> dict[str, Any]:
    """For JSON, what the prices of nodes are of: one step, or of a pipeline one of `microbatches` through all stages,
    which takes `priced_s` with the choices of the plan; and what the tables say of that below them."""
    return {
        "prices_of": "microbatch" if plan.pipelined else "step",
        "microbatches": plan.microbatches,
        "priced_s": priced_s,
        "predicted_step_s": plan.predicted.step_s,
        "notes": _whose(plan, priced_s),
    }


def _whose(plan: Plan, priced_s: float) -> list[str]:
    """Of what these prices are, where `priced_s` for all choices is not the plan's step; and on which device, where
    places have several kinds."""
    found, at = [], Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh)
    if plan.pipelined:
        found.append(
            f"seconds and bytes of nodes are those of one microbatch of {plan.microbatches} through all stages, on one "
            f"place; the plan's step takes {seconds(plan.predicted.step_s)}"
        )
    elif seconds(priced_s) != seconds(plan.predicted.step_s):
        found.append(
            "prices are those of each choice alone, which do not see what hides in which pass: all choices "
            f"{seconds(priced_s)}, the plan's step {seconds(plan.predicted.step_s)}"
        )
    if at.mixed:
        found.append(
            f"prices of nodes are those of place 0, {at.device(0).name}; of reshards those of the slowest place"
        )
    return found


def _alternatives(title: str, rows: Sequence[why.Row], plan: Plan) -> Table:
    priced = "one microbatch" if plan.pipelined else "step"
    table = grid(title, "", f"split on {'; '.join(plan.axes)}", "result lies as", priced, "difference", "memory")
    mine = next(row for row in rows if row.chosen)
    for row in rows:
        table.add_row(
            "chosen" if row.chosen else "",
            row.label,
            row.result,
            _price(row.step_s),
            _difference(row.step_s - mine.step_s),
            gibibytes(row.memory_bytes),
        )
    return table


def _nodes(parts: Sequence[why.Part]) -> Table:
    table = grid("nodes that cost most", "node", "where", "split", "own time", "next best", "would cost")
    for part in parts:
        table.add_row(part.node, part.where, part.label, seconds(part.own_s), part.next_label, _difference(part.next_s))
    return table


def _reshards(rows: Sequence[Reshard]) -> RenderableType:
    if not any(row.step_s > 0 for row in rows):
        return "no reshards: nothing that costs anything moves between ranks outside of operators"
    table = grid(
        "reshards that cost most",
        "tensor",
        "for",
        "from -> to",
        "collectives, bytes and price of one run",
        "runs",
        "per step",
    )
    for row in rows:
        if row.step_s > 0:
            table.add_row(
                row.tensor,
                ROLES[row.role] or ", ".join(row.readers[:2]),
                f"{row.src} -> {row.dst}",
                row.reason,
                str(row.count),
                seconds(row.step_s),
            )
    return table


def _price(value: float) -> str:
    return seconds(value) if math.isfinite(value) else "not possible"


def _difference(value: float) -> str:
    if not math.isfinite(value):
        return "no other"
    return f"{'+' if value >= 0 else '-'}{seconds(abs(value))}" if value else "0"
