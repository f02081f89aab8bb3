"""Clusters that differ from the presets: of two kinds of devices, or with slow links."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cluster.mixed import join


def slower(cluster: Cluster, times: float, memory: float = 1.0) -> Cluster:
    """The same with devices that are `times` as slow and have `memory` of the memory."""
    device = cluster.device
    peaks = {dtype: rate / times for dtype, rate in device.peak_flops.items()}
    return replace(
        cluster,
        name="slow",
        device=replace(
            device,
            name="slow",
            peak_flops=peaks,
            vector_flops=device.vector_flops / times,
            launch_s=device.launch_s * times,
            memory_bandwidth_bytes_s=device.memory_bandwidth_bytes_s / times,
            memory_bytes=int(device.memory_bytes * memory),
        ),
    )


def two_kinds(text: str, times: float, memory: float = 1.0) -> Cluster:
    """`text`, then as many devices that are `times` as slow."""
    fast = Cluster.parse(text)
    return join([fast, slower(fast, times, memory)])


def far(text: str) -> Cluster:
    """`text` over links with a tenth of the bandwidth and twice the latency: sums over them are dear."""
    base = Cluster.parse(text)
    levels = tuple(
        replace(
            level,
            bandwidth_bytes_s=level.bandwidth_bytes_s / 10,
            protocols=tuple(
                replace(protocol, start_s=2 * protocol.start_s, hop_s=2 * protocol.hop_s)
                for protocol in level.protocols
            ),
        )
        for level in base.levels
    )
    return replace(base, levels=levels)
