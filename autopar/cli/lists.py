"""`autopar recipes` and `autopar clusters`: what can be named."""

from __future__ import annotations

from autopar.cli.console import show, write_json
from autopar.cluster import Cluster, presets
from autopar.recipes import RECIPES
from autopar.recipes.offload import OFFLOADS
from autopar.recipes.pipelines import PIPELINES
from autopar.report.grid import grid
from autopar.report.text import gibibytes


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


def clusters_command(json: str | None) -> None:
    """List the presets of clusters."""
    found = [Cluster.parse(name) for name in presets()]
    if write_json(json, [cluster.to_dict() for cluster in found]):
        return
    table = grid("clusters: --cluster NAME:SIZES, as h100:8x8", "name", "device", "levels", "memory", "peak TFLOP/s",
                 "GB/s per device and direction")
    for cluster in found:
        rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in cluster.device.peak_flops.items())
        links = ", ".join(f"{level.name} {level.bandwidth_bytes_s / 1e9:.3g}" for level in cluster.levels)
        table.add_row(cluster.name, cluster.device.name, " x ".join(level.name for level in cluster.levels),
                      gibibytes(cluster.device.memory_bytes), rates, links)
    show(table)
