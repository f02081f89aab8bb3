"""A cluster whose constants explain a profile: each group of constants scaled by how much longer all of its rows took
than predicted.

    matmuls, attention     the peak of the plan's dtype and the shares of attention
    other operators        starting an operator, arithmetic, memory
    the optimizer          its seconds for each parameter and its share of the bandwidth
    each collective        start and efficiency of the protocols that run it, on all levels

The peak answers for what matmuls take beside being started, which the other operators tell of. Groups that took no
time, or that nothing was predicted for, stay as they are, and so does the peak where matmuls mostly wait to be started
(it would take the blame for slow or fast starts); no group changes by more than MOST, and no collective is faster than
its links can be: those of a GPU carry what their level says, ranks of CPUs what one reads and writes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from autopar.calibrate.fit_level import limit_bytes_s
from autopar.cluster import Cluster, Device, Level, Protocol
from autopar.cluster.types import ALGORITHMS
from autopar.cost.memory import computes_in
from autopar.errors import ClusterError
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.kernels import multiplies
from autopar.profile.profile import Profile, Row

MOST = 10.0
"""No constant is scaled by more, or by less than its inverse: what is further off is no matter of constants."""

STARTED = 0.5
"""Matmuls that are started for this share of their seconds, predicted or measured, say nothing of the peak."""


def refit(
    cluster: Cluster, plan: Plan, program: Program, found: Profile, date: str
) -> tuple[Cluster, dict[str, float]]:
    """The cluster, and by group how many times as long as predicted it took; `date` goes into the sources. Raises
    ClusterError as `check`."""
    check(cluster, cluster.device.kind)
    ratios = _ratios(found.rows, program)
    source = f"refitted {date} from a profile of {plan.model} ({plan.strategy}, {plan.ranks} ranks)"
    device = _device(cluster.device, ratios, computes_in(plan.precision), source)
    levels = tuple(_level(level, ratios, source, limit_bytes_s(device, level)) for level in cluster.levels)
    return dataclasses.replace(cluster, device=device, levels=levels), ratios


def check(cluster: Cluster, kind: str) -> None:
    """Raise ClusterError where ranks on devices of `kind` tell nothing of `cluster`: one of parts, as a profile is of
    one rank, and so of one kind of device; and one of other devices."""
    if cluster.parts:
        raise ClusterError(
            f"cluster {cluster.label} has parts of {len(cluster.parts)} kinds, and a profile tells of one rank: refit "
            "from a plan for one part, and name the file that comes of it in the file of the whole cluster"
        )
    if cluster.device.kind != kind:
        raise ClusterError(
            f"cluster {cluster.label} has devices of kind {cluster.device.kind}, and here the plan runs on {kind} "
            f"ranks, which tell nothing of a {cluster.device.name}: refit where there are as many of those as the plan "
            "has ranks, or profile without a refit"
        )


def _ratios(rows: tuple[Row, ...], program: Program) -> dict[str, float]:
    """Measured over predicted by group."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        each = sums.setdefault(_group(row, program), [0.0, 0.0, 0.0])
        for index, seconds in enumerate((row.measured_s, row.predicted_s, row.starts_s)):
            each[index] += seconds
    found = {
        group: _within(measured / foreseen)
        for group, (measured, foreseen, _) in sums.items()
        if measured > 0 and foreseen > 0
    }
    if "matmul" in found:
        measured, foreseen, begun = sums["matmul"]
        started = begun * found.get("other", 1.0)
        found["matmul"] = (
            _within((measured - started) / (foreseen - begun))
            if begun < STARTED * foreseen and started < STARTED * measured
            else 1.0
        )
    return found


def _within(ratio: float) -> float:
    return min(MOST, max(1 / MOST, ratio))


def _group(row: Row, program: Program) -> str:
    if row.what == "operator":
        op = program.ops.get(str(row.key[1]))
        return "matmul" if op is not None and multiplies(op) else "other"
    if row.what in ("optimizer", "copies"):
        return {"optimizer": "optimizer", "copies": "other"}[row.what]
    return str(row.key[1] if row.what == "gradients" else row.key[0])


def _device(device: Device, ratios: Mapping[str, float], dtype: str, source: str) -> Device:
    matmul, other, update = (ratios.get(group, 1.0) for group in ("matmul", "other", "optimizer"))
    key = dtype if dtype in device.peak_flops else "float32"
    changed = {
        "peak_flops": {**device.peak_flops, key: device.peak_flops[key] / matmul},
        "launch_s": min(1.0, device.launch_s * other),
        "vector_flops": device.vector_flops / other,
        "memory_bandwidth_bytes_s": device.memory_bandwidth_bytes_s / other,
        "cache_bandwidth_bytes_s": device.cache_bandwidth_bytes_s / other,
        "update_s": min(1.0, device.update_s * update),
        "update": min(1.0, max(1e-3, device.update * other / update)),
    }
    changed = {name: value for name, value in changed.items() if value != getattr(device, name)}
    return dataclasses.replace(device, **changed, sources={**device.sources, **dict.fromkeys(changed, source)})  # type: ignore[arg-type]


def _level(level: Level, ratios: Mapping[str, float], source: str, most_bytes_s: float = math.inf) -> Level:
    """Protocols that serve several collectives are split, so that each has a ratio of its own. Where one is faster than
    the level's bandwidth, that is raised, to `most_bytes_s` at most, and all efficiencies are shares of the new one."""
    most = max(1.0, most_bytes_s / level.bandwidth_bytes_s)
    scaled = [
        (p, kind, min(most, p.efficiency / ratios.get(kind, 1.0)))
        for p in level.protocols
        for kind in _kinds(p, ratios)
    ]
    raised = max(1.0, *(efficiency for *_, efficiency in scaled))
    protocols = tuple(_scaled(p, kind, ratios.get(kind), efficiency / raised, source) for p, kind, efficiency in scaled)
    return dataclasses.replace(
        level,
        bandwidth_bytes_s=level.bandwidth_bytes_s * raised,
        protocols=protocols,
        source=source if raised > 1 else level.source,
    )


def _kinds(protocol: Protocol, ratios: Mapping[str, float]) -> tuple[str, ...]:
    served = protocol.kinds or ALGORITHMS[protocol.algorithm]
    return served if any(kind in ratios for kind in served) else ("",)


def _scaled(protocol: Protocol, kind: str, ratio: float | None, efficiency: float, source: str) -> Protocol:
    efficiency = min(1.0, max(1e-3, efficiency))
    if not kind:
        return dataclasses.replace(protocol, efficiency=efficiency)
    if ratio is None:
        return dataclasses.replace(protocol, kinds=(kind,), efficiency=efficiency)
    return dataclasses.replace(
        protocol,
        kinds=(kind,),
        start_s=min(1.0, protocol.start_s * ratio),
        hop_s=min(1.0, protocol.hop_s * ratio),
        efficiency=efficiency,
        source=source,
    )
