"""Mesh axes on the levels of a cluster.

Devices are numbered row-major: the last axis varies fastest, so it fills the innermost level first. Reading the axis
sizes from the last one on, each takes a share of the innermost level that still has room:

    h100:8x8, sizes (8, 2, 4)    node = all of level node, a1 = 2 of level gpu, a2 = 4 of level gpu
    h100:8x8, sizes (4, 16)      a0 = 4 of level node, a1 = 2 of level node x all of level gpu
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from autopar.errors import ClusterError

if TYPE_CHECKING:
    from autopar.cluster.types import Cluster, Device, Level


@dataclass(frozen=True)
class Span:
    """`size` parts of `level`, out of its `level.size`."""

    level: Level
    size: int

    @property
    def bandwidth_bytes_s(self) -> float:
        """Bytes per second and direction of one device within this span."""
        return self.level.pair_bandwidth_bytes_s(self.size)


@dataclass(frozen=True)
class MeshAxis:
    """One mesh axis: `size` devices, and the parts of levels that they span, outermost first (none when size is 1).

    Several groups along the axis run side by side. They share no link: the bandwidth of a level is per device, and a
    group with k members in a node uses the network share of just these k.
    """

    name: str
    size: int
    spans: tuple[Span, ...] = field(hash=False)
    device: Device = field(hash=False)

    @property
    def bandwidth_bytes_s(self) -> float:
        """That of the slowest span, per device and direction (infinite when the axis has one device)."""
        return min((span.bandwidth_bytes_s for span in self.spans), default=math.inf)

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message over the slowest span (0 when the axis has one device)."""
        return max((span.level.latency_s for span in self.spans), default=0.0)


@dataclass(frozen=True)
class Mesh:
    """Axes over all the devices of a cluster, the first varying slowest."""

    axes: tuple[MeshAxis, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def device(self) -> Device:
        return self.axes[0].device

    def __str__(self) -> str:
        """`node=8, gpu=8`."""
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)


def make_mesh(cluster: Cluster, sizes: tuple[int, ...]) -> Mesh:
    """See `Cluster.mesh`."""
    sizes = tuple(sizes)
    if not sizes or any(type(n) is not int or n < 1 for n in sizes) or math.prod(sizes) != cluster.devices:
        raise ClusterError(f"cluster {cluster.label}: mesh {sizes} does not multiply to its {cluster.devices} devices")
    spans = spans_of(cluster, sizes)
    if spans is None:
        raise ClusterError(
            f"cluster {cluster.label}: an axis of mesh {sizes} straddles a level: its groups would be cut "
            f"unevenly by {' x '.join(level.name for level in cluster.levels)}; possible: "
            f"{', '.join(map(str, cluster.meshes()))}"
        )
    axes = zip(sizes, spans, strict=True)
    return Mesh(tuple(MeshAxis(_name(i, parts), n, parts, cluster.device) for i, (n, parts) in enumerate(axes)))


def _name(index: int, parts: tuple[Span, ...]) -> str:
    whole = len(parts) == 1 and parts[0].size == parts[0].level.size
    return parts[0].level.name if whole else f"a{index}"


def spans_of(cluster: Cluster, sizes: tuple[int, ...]) -> list[tuple[Span, ...]] | None:
    """The spans of each axis, or None where an axis would straddle a level."""
    room = [level.size for level in cluster.levels]
    found: list[tuple[Span, ...]] = []
    for size in reversed(sizes):
        parts: list[Span] = []
        for index in range(len(room) - 1, -1, -1):
            take = math.gcd(size, room[index])
            if take > 1:
                parts.append(Span(cluster.levels[index], take))
                size, room[index] = size // take, room[index] // take
            if size > 1 and room[index] > 1:
                return None
        found.append(tuple(reversed(parts)))
    return found[::-1]


def candidates(cluster: Cluster, max_axes: int) -> list[tuple[int, ...]]:
    """See `Cluster.meshes`."""
    if max_axes < 1:
        raise ClusterError(f"cluster {cluster.label}: max_axes is {max_axes}; wanted at least 1")
    if cluster.devices == 1:
        return [(1,)]
    ranked: list[tuple[int, int, int, tuple[int, ...]]] = []
    for sizes in factorisations(cluster.devices, max_axes):
        spans = spans_of(cluster, sizes)
        if spans is not None:
            crossings = sum(len(parts) > 1 for parts in spans)
            partial = sum(part.size != part.level.size for parts in spans for part in parts)
            ranked.append((len(sizes), crossings, partial, tuple(-n for n in sizes)))
    return [tuple(-n for n in key[3]) for key in sorted(ranked)]


def factorisations(number: int, parts: int) -> list[tuple[int, ...]]:
    """The ordered ways to write `number` as a product of at most `parts` factors over 1."""
    out: list[tuple[int, ...]] = [(number,)]
    if parts > 1:
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                out += [(first, *rest) for rest in factorisations(number // first, parts - 1)]
    return out
