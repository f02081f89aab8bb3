"""`autopar clusters`: the clusters that can be named. Nothing here needs torch, so that it answers at once."""

from __future__ import annotations

from autopar.cli.console import show, write_json
from autopar.cluster import Cluster, presets
from autopar.report.grid import grid
from autopar.text import gibibytes, three


def clusters_command(json: str | None) -> None:
    """List the presets of clusters."""
    found = [Cluster.parse(name) for name in presets()]
    if write_json(json, [cluster.to_dict() for cluster in found]):
        return
    table = grid(
        "clusters: --cluster NAME:SIZES, as h100:8x8",
        "name",
        "device",
        "levels",
        "memory",
        "peak TFLOP/s",
        "GB/s per device and direction",
    )
    for cluster in found:
        rates = ", ".join(f"{dtype} {three(rate / 1e12)}" for dtype, rate in cluster.device.peak_flops.items())
        links = ", ".join(f"{level.name} {three(level.bandwidth_bytes_s / 1e9)}" for level in cluster.levels)
        table.add_row(
            cluster.name,
            cluster.device.name,
            " x ".join(level.name for level in cluster.levels),
            gibibytes(cluster.device.memory_bytes),
            rates,
            links,
        )
    show(table)
