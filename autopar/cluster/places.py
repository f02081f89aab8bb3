"""Pipeline places on a cluster: which part each lies in, its mesh and device, and the links between places.

Places are consecutive ranks. On a cluster of one kind all are alike, and what goes from one to another takes the
pipeline axis, the outermost of the mesh. On a cluster of parts each place lies within one of them; what goes from part
to part takes the network between these two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.mesh import Mesh, MeshAxis, Span, factorisations, make_mesh, spans_of
from autopar.cluster.mixed import between, join
from autopar.cluster.types import Cluster, Device
from autopar.errors import ClusterError

MOST_ORDERS = 3  # parts of which all orders are tried; of more only the given one and its reverse


@dataclass(frozen=True)
class Places:
    """`count` places of `cluster`, each with a mesh of `sizes`. Raises ClusterError where they are not as many as the
    devices, an axis straddles a level, or a place would lie in two parts."""

    cluster: Cluster
    count: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.count * math.prod(self.sizes) != self.cluster.devices:
            raise ClusterError(
                f"cluster {self.cluster.label}: {self.count} places of {self.sizes} are not its {self.cluster.devices} "
                "devices"
            )
        if self.mixed and not _fits(self.cluster, self.sizes):
            raise ClusterError(
                f"cluster {self.cluster.label}: {self.count} places of {self.sizes} do not lie within its parts of "
                f"{', '.join(str(part.devices) for part in self.cluster.parts)} devices"
            )
        assert self._meshes, "there is a mesh for each part"  # raises where an axis straddles a level

    @property
    def mixed(self) -> bool:
        """Whether places may differ: there are several, on several parts."""
        return self.count > 1 and bool(self.cluster.parts)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """For each place the number of the part that it lies in."""
        if not self.mixed:
            return (0,) * self.count
        size = math.prod(self.sizes)
        return tuple(
            itertools.chain.from_iterable(
                [index] * (part.devices // size) for index, part in enumerate(self.cluster.parts)
            )
        )

    @property
    def kinds(self) -> tuple[int, ...]:
        """The first place of each part: of one cluster the first of all."""
        return tuple(self.homes.index(home) for home in dict.fromkeys(self.homes))

    def part(self, place: int) -> Cluster:
        """The part that a place lies in; the cluster itself where there are none."""
        return self.cluster.parts[self.homes[place]] if self.mixed else self.cluster

    def device(self, place: int) -> Device:
        """The device of a place."""
        return self.part(place).device

    def mesh(self, place: int) -> Mesh:
        """The mesh of a place: the axes behind the pipeline axis."""
        axes = self._meshes[self.homes[place]].axes
        return Mesh(axes[1:]) if self._behind(self.homes[place]) > 1 else Mesh(axes)

    def axis(self, places: Sequence[int]) -> MeshAxis:
        """The links of a group of two or more places."""
        homes = dict.fromkeys(self.homes[place] for place in places)
        if len(homes) > 1:
            level = between([self.cluster.parts[home] for home in homes], self.cluster.link)
            return MeshAxis(
                "places", len(places), (Span(replace(level, size=len(places)), len(places)),), self.cluster.device
            )
        line = self._meshes[self.homes[places[0]]].axes[0]
        return (
            line
            if len(places) == line.size
            else replace(line, size=len(places), spans=(replace(line.spans[0], size=len(places)),))
        )

    def link(self, one: int, other: int) -> MeshAxis:
        """The links over which one place sends to another: those of the whole pipeline axis where both are of one
        part."""
        if self.homes[one] != self.homes[other]:
            return self.axis((one, other))
        return self._meshes[self.homes[one]].axes[0]

    def _behind(self, home: int) -> int:
        """How many places lie in a part."""
        return self.homes.count(home)

    @cached_property
    def _meshes(self) -> tuple[Mesh, ...]:
        """For each part its mesh, with the pipeline axis in front where several places lie in it."""
        parts = self.cluster.parts if self.mixed else (self.cluster,)
        return tuple(
            make_mesh(part, (self._behind(i), *self.sizes) if self._behind(i) > 1 else self.sizes)
            for i, part in enumerate(parts)
        )


def pipelines(cluster: Cluster, max_axes: int) -> list[tuple[int, tuple[int, ...]]]:
    """All (places, mesh of a place) of two or more places, each mesh of at most `max_axes` axes (`(1,)`: one
    device)."""
    if not cluster.parts:
        return [(mesh[0], mesh[1:] or (1,)) for mesh in cluster.meshes(max_axes=1 + max_axes) if mesh[0] > 1]
    common = math.gcd(*(part.devices for part in cluster.parts))
    each = [size for size in range(1, common + 1) if common % size == 0]
    found = [
        (cluster.devices // size, sizes)
        for size in each
        for sizes in ([(1,)] if size == 1 else factorisations(size, max_axes))
    ]
    return [(places, sizes) for places, sizes in found if _fits(cluster, sizes)]


def _fits(cluster: Cluster, sizes: tuple[int, ...]) -> bool:
    """Whether places of a mesh fill every part."""
    size = math.prod(sizes)
    return all(
        part.devices % size == 0 and spans_of(part, (part.devices // size, *sizes)) is not None
        for part in cluster.parts
    )


def orders(cluster: Cluster) -> list[Cluster]:
    """The cluster with its parts in every order that differs, the given one first; of many parts that one and its
    reverse."""
    if not cluster.parts:
        return [cluster]
    named = cluster.name == "+".join(part.label for part in cluster.parts)
    ways = (
        itertools.permutations(cluster.parts)
        if len(cluster.parts) <= MOST_ORDERS
        else (cluster.parts, cluster.parts[::-1])
    )
    different: list[tuple[Cluster, ...]] = []
    for parts in ways:
        if parts not in different:
            different.append(parts)
    return [cluster, *(join(parts, cluster.link, "" if named else cluster.name) for parts in different[1:])]
