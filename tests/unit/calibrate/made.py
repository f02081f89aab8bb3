"""Measurements of a machine that is known: what a calibration must find again."""

from __future__ import annotations

import dataclasses
import random

from autopar.calibrate.background import ALONE, BEHIND, OVER
from autopar.calibrate.machine import OBLONG, SQUARES, STREAMS
from autopar.calibrate.network import KINDS, SIZES
from autopar.calibrate.samples import Sample
from autopar.cluster import Cluster, MeshAxis, Protocol
from autopar.cluster.mesh import Span
from autopar.cluster.types import ALGORITHMS
from autopar.cost.comm import collective_s
from autopar.cost.compute import op_s


def machine(ranks: int = 4) -> Cluster:
    """A CPU with numbers of its own."""
    base = Cluster.parse(f"cpu:1x{ranks}")
    protocols = tuple(
        Protocol(
            f"{kind}{n}",
            "direct" if kind in ALGORITHMS["direct"] else "ring",
            1e-4 * n,
            0.0,
            0.5,
            "known",
            (kind,),
            n,
            4e6,
            2.0,
        )
        for kind in KINDS
        for n in range(2, ranks + 1)
        if ranks % n == 0
    )
    device = dataclasses.replace(
        base.device,
        peak_flops={"float32": 50e9, "float64": 25e9},
        tile=6,
        launch_s=7e-6,
        memory_bandwidth_bytes_s=5e9,
        cache_bytes=2 << 20,
        cache_bandwidth_bytes_s=20e9,
        vector_flops=4e9,
        update_s=3e-4,
        update=0.3,
        alone=2.0,
        contention=0.6,
        action_s=4e-4,
    )
    return Cluster(
        "known",
        (base.levels[0], dataclasses.replace(base.levels[1], bandwidth_bytes_s=2e9, protocols=protocols)),
        device,
    )


def samples(cluster: Cluster, noise: float, seed: int) -> list[tuple[int, Sample]]:
    """What a calibration would measure there, each time off by up to `noise`."""
    chance, device, found = random.Random(seed), cluster.device, list[tuple[int, Sample]]()

    def add(level: int, what: str, size: tuple[int, ...], seconds: float, members: int = 1) -> None:
        found.append((level, Sample(what, size, seconds * (1 + chance.uniform(-noise, noise)), members)))

    for dtype in device.peak_flops:
        for m, n, k in (*((size,) * 3 for size in SQUARES["cpu"]), *OBLONG["cpu"]):
            add(-1, f"matmul {dtype}", (m, n, k), op_s(2.0 * m * n * k, 0.0, dtype, device, matmul=(m, n, k)))
    for nbytes in STREAMS["cpu"]:
        add(-1, "copy", (2 * nbytes,), device.launch_s + device.memory_s(2 * nbytes))
        add(-1, "add", (3 * nbytes,), device.launch_s + device.memory_s(3 * nbytes))
    for flops in (1 << 17, 1 << 19, 1 << 21):
        add(-1, "gelu", (flops,), device.launch_s + flops / device.vector_flops)
    add(-1, "launch", (8,), device.launch_s)
    for elements in (1 << 10, 1 << 17, 1 << 20):
        add(
            -1,
            "update",
            (elements,),
            device.update_s + 28 * elements / (device.memory_bandwidth_bytes_s * device.update),
        )
    for count in (8, 16, 32):
        add(-1, "schedule", (count,), 1e-3 + count * 2 * device.action_s)
    add(-1, "matmul beside others", (256,) * 3, 2e-3)
    add(-1, "matmul alone", (256,) * 3, 1e-3)
    for which in ("all_gather", "all_reduce"):
        for what, seconds in ((ALONE, 10e-3), (OVER, 16e-3), (BEHIND, 20e-3)):
            add(-1, f"{what} {which}", (1 << 22,), seconds, cluster.levels[1].size)
    level = cluster.levels[1]
    for members in (n for n in range(2, level.size + 1) if level.size % n == 0):
        axis = MeshAxis("axis", members, (Span(level, members),), device)
        for kind in KINDS:
            for nbytes in SIZES["cpu"]:
                add(1, kind, (nbytes,), collective_s(kind, nbytes, axis), members)
    return found
