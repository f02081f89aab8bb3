"""Clusters of two kinds of devices, one of them `times` as slow as the other in everything."""

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
