"""`autopar recipes`: the strategies that can be named."""

from __future__ import annotations

from autopar.cli.console import show, write_json
from autopar.recipes import RECIPES
from autopar.recipes.offload import OFFLOADS
from autopar.recipes.pipelines import PIPELINES
from autopar.report.grid import grid


def recipes_command(json: str | None) -> None:
    """List the named strategies."""
    rows = [{"name": r.name, "axes": len(r.roles), "about": r.about} for r in RECIPES.values()]
    rows += [{"name": p.name, "axes": 1 + len(p.roles), "about": p.about} for p in PIPELINES.values()]
    rows += [{"name": o.name, "axes": len(RECIPES[o.base].roles), "about": o.about} for o in OFFLOADS.values()]
    if write_json(json, rows):
        return
    table = grid("recipes: --recipe NAME", "name", "mesh axes", "what it does")
    for row in rows:
        table.add_row(str(row["name"]), str(row["axes"]), str(row["about"]))
    show(table)
