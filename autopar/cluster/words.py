"""A cluster in words."""

from __future__ import annotations

from autopar.cluster.types import Cluster, Device, Level


def describe(cluster: Cluster) -> str:
    """See `Cluster.describe`: each part with its devices and links, then what all of them amount to in lockstep."""
    if not cluster.parts:
        return "\n".join([f"{cluster.label}: {cluster.devices} x {cluster.device.name}", *_lines(cluster)])
    lines = [f"{cluster.label}: {cluster.devices} devices in {len(cluster.parts)} parts"]
    for part in cluster.parts:
        lines += [f"  {part.label}: {part.devices} x {part.device.name}", *("  " + line for line in _lines(part))]
    return "\n".join(
        [*lines, "  all at once, as slow as the slowest of them", *("  " + line for line in _lines(cluster))]
    )


def _lines(cluster: Cluster) -> list[str]:
    return [_device(cluster.device), *(_level(level) for level in cluster.levels)]


def _device(device: Device) -> str:
    rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.peak_flops.items())
    return (
        f"  device  {device.memory_bytes / 2**30:.1f} GiB ({device.usable_memory_bytes / 2**30:.1f} usable), "
        f"{device.memory_bandwidth_bytes_s / 1e9:g} GB/s; peak TFLOP/s: {rates}"
    )


def _level(level: Level) -> str:
    return (
        f"  {level.name:<6}  x{level.size}, {level.bandwidth_bytes_s / 1e9:g} GB/s per device and direction, "
        f"{level.latency_s * 1e6:.1f} us"
    )
