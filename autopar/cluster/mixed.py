"""Clusters of several parts: other devices, or nodes of another size, joined by a network.

    join(parts)       the Cluster of parts, whose ranks are numbered part by part
    slowest(devices)  the device that ranks in lockstep amount to
    between(parts)    the network that joins parts

What runs on all ranks at once waits for the slowest of them. So `levels` and `device` of such a Cluster are those of
its parts in lockstep: of every level the slowest one, of every rate the least, the least memory. Pipeline places lie
within one part each, and have its device and its links (autopar.cluster.places).

Levels in lockstep: where parts differ in their outermost level only (2 nodes of 8 and 4 nodes of 8), that one added up
over the network between parts, and the inner ones as they are. Otherwise (a node of 8 and one of 4) two levels: groups
of as many devices as divide every node, and the network between the groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster.types import Cluster, Device, Level
from autopar.errors import ClusterError


def join(parts: Sequence[Cluster], link: Level | None = None, name: str = "") -> Cluster:
    """The cluster of two or more parts; `link` is the network between any two of them (its size does not matter), None
    where it is the slower one of the networks that they have themselves.

    Raises ClusterError for fewer parts, parts of parts, CPU and CUDA devices together, and parts that have no network.
    """
    parts, label = tuple(parts), "+".join(part.label for part in parts)
    if len(parts) < 2:
        raise ClusterError(f"cluster {name or label!r}: parts are {[p.label for p in parts]}; wanted two or more")
    if any(part.parts for part in parts):
        raise ClusterError(f"cluster {name or label!r}: a part has parts itself; list all of them side by side")
    kinds = {part.device.kind: part.label for part in parts}
    if len(kinds) > 1:
        raise ClusterError(
            f"cluster {name or label!r}: {' and '.join(f'{where} is {kind}' for kind, where in kinds.items())}; ranks "
            "of one program run on one kind of backend, wanted all cpu or all cuda"
        )
    return Cluster(name or label, _levels(parts, link), slowest([part.device for part in parts]), parts, link)


def between(parts: Sequence[Cluster], link: Level | None = None) -> Level:
    """The network that joins some parts: `link`, or the slowest of their own. Raises ClusterError where one has
    none."""
    if link is not None:
        return link
    for part in parts:
        if len(part.levels) < 2:
            raise ClusterError(
                f"cluster part {part.label!r} has only level {part.levels[0].name!r}, so nothing is known of a network "
                "that joins it to others; give [link] with bandwidth_bytes_s and latency_s in the cluster file"
            )
    return _slowest([part.levels[0] for part in parts])


def _levels(parts: Sequence[Cluster], link: Level | None) -> tuple[Level, ...]:
    """The levels of the parts in lockstep."""
    network, first = between(parts, link), parts[0]
    outer = _slowest([network, *(part.levels[0] for part in parts if len(part.levels) > 1 and part.levels[0].size > 1)])
    inner = [tuple(level.size for level in part.levels[1:]) for part in parts]
    if inner[0] and all(sizes == inner[0] for sizes in inner):
        count = sum(part.levels[0].size for part in parts)
        deep = [_slowest([part.levels[i] for part in parts]) for i in range(1, len(first.levels))]
        return tuple(
            replace(level, name=named.name, size=size)
            for level, named, size in zip([outer, *deep], first.levels, (count, *inner[0]), strict=True)
        )
    group = math.gcd(*(part.levels[-1].size for part in parts))
    near = _slowest([_within(part.levels[-1], group) for part in parts])
    far = _slowest([outer, *(level for part in parts for level in part.levels[1:-1])])
    top = first.levels[0].name if len(first.levels) > 1 else "node" if first.levels[-1].name != "node" else "link"
    return replace(far, name=top, size=sum(part.devices for part in parts) // group), replace(
        near, name=first.levels[-1].name, size=group
    )


def _within(level: Level, size: int) -> Level:
    """`size` parts of a level as a level."""
    return (
        replace(level, size=size, bandwidth_bytes_s=level.pair_bandwidth_bytes_s(size))
        if size > 1
        else replace(level, size=1)
    )


def _slowest(levels: Sequence[Level]) -> Level:
    """The level over which large messages take longest; of equals the one over which small ones do."""
    return min(
        levels,
        key=lambda level: (level.bandwidth_bytes_s * max(p.efficiency for p in level.protocols), -level.latency_s),
    )


def slowest(devices: Sequence[Device]) -> Device:
    """What devices in lockstep amount to: of each rate the least that one of them reaches, of each delay the longest,
    the least memory.

    How matmuls lose by their shape (units, tile, best_shape, achievable) is that of the device whose bfloat16 matmuls
    are slowest; peaks are in proportion, so that peak x share is the least rate of all for each dtype.
    """
    first = devices[0]
    if all(device == first for device in devices):
        return first
    slow = min(devices, key=lambda device: _reached(device, "bfloat16"))
    small = min(devices, key=lambda device: device.usable_memory_bytes)
    narrow = min(devices, key=lambda device: device.memory_bandwidth_bytes_s * device.achievable_bandwidth)
    peaks = {
        dtype: _peak(slow, devices, dtype)
        for dtype in dict.fromkeys(dtype for device in devices for dtype in device.peak_flops)
    }
    cached = min(device.cache_bytes for device in devices)
    return replace(
        slow,
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        peak_flops=peaks,
        attention=_attention(slow, devices, peaks),
        memory_bytes=small.memory_bytes,
        usable_memory=small.usable_memory,
        memory_bandwidth_bytes_s=narrow.memory_bandwidth_bytes_s,
        achievable_bandwidth=narrow.achievable_bandwidth,
        cache_bytes=cached,
        cache_bandwidth_bytes_s=min(device.cache_bandwidth_bytes_s for device in devices) if cached else 0.0,
        vector_flops=min(device.vector_flops or device.flops("float32") for device in devices)
        if any(d.vector_flops for d in devices)
        else 0.0,
        **{
            name: max(getattr(device, name) for device in devices)
            for name in ("launch_s", "dispatch_s", "spread", "update_s", "action_s")
        },
        contention=max(device.contended for device in devices),
        **{
            name: min(getattr(device, name) for device in devices)
            for name in ("update", "alone", "host_memory_bytes", "host_link_bytes_s", "host_bandwidth_bytes_s")
        },
        sources={"name": f"the slowest of {', '.join(device.name for device in devices)} in each respect"},
    )


def _reached(device: Device, dtype: str) -> float:
    """FLOP/s of the best matmul over a step."""
    return device.flops(dtype) * device.best_share(dtype) * device.sustained


def _peak(slow: Device, devices: Sequence[Device], dtype: str) -> float:
    """The peak of `slow` in proportion to the least rate of all."""
    least = min(_reached(device, dtype) for device in devices)
    return slow.flops(dtype) if least == _reached(slow, dtype) else least / (slow.best_share(dtype) * slow.sustained)


def _attention(slow: Device, devices: Sequence[Device], peaks: dict[str, float]) -> tuple[float, float] | None:
    """Shares of the bfloat16 peak of the slowest fused attention; None where `slow` has none of its own."""
    if slow.attention is None:
        return None
    peak = peaks.get("bfloat16", peaks["float32"])
    known = [(device.flops("bfloat16"), device.attention) for device in devices if device.attention is not None]
    forward, backward = (min(1.0, *(rate * shares[way] / peak for rate, shares in known)) for way in (0, 1))
    return forward, backward
