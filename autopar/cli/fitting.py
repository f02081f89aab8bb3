"""`autopar memory`: will a model fit, under which strategy and up to which sizes; or what the peak of one plan is made
of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar import frontend
from autopar.capture.precision import capture_in
from autopar.cli.console import progress, show, write_json
from autopar.cli.planning import Asked
from autopar.cli.rebuild import rebuild
from autopar.cluster import Cluster
from autopar.cost.memory import check_optimizer
from autopar.errors import PlanError
from autopar.memory import memory_of
from autopar.plan import FILE
from autopar.problem.settings import Settings
from autopar.recipes.names import check_name
from autopar.report.memory import breakdown, fit_row, fit_table
from autopar.request import Request
from autopar.text import gibibytes, times
from autopar.will_it_fit import Row, Survey

NAMES = {"b": "batch", "s": "sequence"}
LOOKED_AT = 4_000_000
"""Larger sizes are shown as "over": a little less than will_it_fit.LARGEST, where the search for the largest size
ends, because that may be no multiple of what a strategy divides by."""
SHOWN = "--shown"
OF_A_PLAN = (SHOWN, "--json")
"""The options that go with a plan file; all others ask for what a plan says already."""


def memory_command(asked: Asked, recipes: Sequence[str], shown: int, json: str | None, given: Sequence[str]) -> None:
    """The table of strategies for a model, or the breakdown of a plan file. Raises PlanError where a plan is `given`
    options of a model, or a model those of a plan."""
    if _is_plan(asked.model):
        if idle := [option for option in given if option not in OF_A_PLAN]:
            raise PlanError(
                f"{', '.join(idle)}: {asked.model} is a plan, which has its own cluster, sizes and strategy; leave "
                f"{'it' if len(idle) == 1 else 'them'} out, or name the MODEL instead of the plan"
            )
        plan_memory(Path(asked.model), shown, json)
        return
    if SHOWN in given:
        raise PlanError(f"{SHOWN}: tensors are shown of the peak of a plan, and {asked.model} is a model; leave it out")
    with progress(f"memory of {asked.model}") as tell:
        survey = _survey(asked, recipes, tell)
        rows = []
        for row in survey.rows(recipes):
            rows.append(row)
            tell(f"{row.name} is known")
    if not write_json(json, as_json(survey, rows)):
        show(*_tables(asked, survey, rows))


def _is_plan(named: str) -> bool:
    """Whether the argument names a plan, and no model: a file that is no Python, or the folder of one."""
    path = Path(named)
    if named.startswith("hf:") or path.suffix == ".py":
        return False
    return path.suffix == ".json" or path.is_file() or (path / FILE).is_file()


def plan_memory(where: Path, shown: int, json: str | None) -> None:
    """What the peak of a saved plan is made of."""
    with progress(f"memory of {where}") as tell:
        rebuilt = rebuild(where, tell)
        prediction = memory_of(rebuilt.captured.gm, rebuilt.plan)
    if not write_json(json, prediction.to_dict()):
        show(breakdown(prediction, shown))


def _survey(asked: Asked, recipes: Sequence[str], tell: Any) -> Survey:
    """The Survey of a model, captured as it is asked for. Raises PlanError for unknown `recipes` before that, but not
    before the model's file is read: it may have recipes of its own."""
    loaded = asked.load()
    for name in recipes:
        check_name(name)
    check_optimizer(asked.optimizer)
    rules = frontend.load_rules(asked.rules)
    captured, precision = capture_in(
        loaded.model, loaded.args, loaded.kwargs, precision=asked.stated, mode=asked.mode, progress=tell
    )
    request = Request(
        Cluster.parse(asked.cluster),
        Settings(asked.mode, asked.optimizer, precision),
        mesh=asked.sizes,
        progress=tell,
        rules=rules,
    )
    return Survey(captured.gm, captured.hints, request)


def _tables(asked: Asked, survey: Survey, rows: Sequence[Row]) -> list[Any]:
    """The table of all strategies, and notes under it."""
    symbols = list(survey.hints)
    sizes = ", ".join(f"{NAMES.get(s, s)} {n}" for s, n in survey.hints.items())
    cluster = survey.request.cluster
    table = fit_table(
        f"{asked.model} on {cluster.label}: {sizes}, {survey.request.settings.precision}, {asked.optimizer}; "
        f"{', '.join(_usable(part) for part in cluster.parts) or _usable(cluster)} usable",
        [NAMES.get(s, s) for s in symbols],
    )
    notes = []
    for row in rows:
        if row.place is None:
            table.add_row(row.name, times(row.mesh) if row.mesh else "-", *["-"] * 8, "no", *["-"] * len(symbols))
            notes.append(f"{row.name}: {row.why.splitlines()[0]}")
        else:
            table.add_row(
                row.name,
                times(row.mesh),
                *fit_row(row.place, row.limit_bytes, fits=row.fits),
                *(_size(row.largest.get(s, 0), survey.most.get(s)) for s in symbols),
            )
    if again := [row.name for row in rows if row.plan is not None and row.plan.remat]:
        notes.append(f"with blocks that are run again in the backward: {', '.join(again)}")
    return [table, *(["", *notes] if notes else [])]


def _usable(cluster: Cluster) -> str:
    device = cluster.device
    return f"{gibibytes(device.usable_memory_bytes)} of {gibibytes(device.memory_bytes)}"


def _size(size: int, most: int | None) -> str:
    if most is None and size > LOOKED_AT:
        return f"over {LOOKED_AT}"
    return f"{size} (all positions)" if most is not None and size == most else str(size) if size else "none"


def as_json(survey: Survey, rows: Sequence[Row]) -> dict[str, Any]:
    """The table as data."""
    return {
        "cluster": survey.request.cluster.label,
        "hints": dict(survey.hints),
        "precision": survey.request.settings.precision,
        "optimizer": survey.request.settings.optimizer,
        "usable_bytes": survey.limit_bytes,
        "rows": [
            {
                "name": row.name,
                "mesh": list(row.mesh),
                "fits": row.fits,
                "why": row.why,
                "largest": dict(row.largest),
                "host_bytes": row.host_bytes,
                "remat": {} if row.plan is None else {scope: list(names) for scope, names in row.plan.remat.items()},
                "prediction": None if row.prediction is None else row.prediction.to_dict(),
            }
            for row in rows
        ],
    }
