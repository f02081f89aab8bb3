"""The free search: which meshes it tries, and what each axis may do."""

from __future__ import annotations

from collections.abc import Callable

from autopar.cluster import Cluster, Mesh
from autopar.recipes import roles


def spaces(cluster: Cluster, cuts_samples: Callable[[int], bool]) -> list[tuple[int, ...]]:
    """The meshes that are searched: all of one and two axes; of three those whose outermost axis, which splits samples,
    is the cluster's own, or as many of its parts as there are samples for. What is near the best of them is also looked
    at `unfolded`."""
    level = cluster.levels[0].size
    outermost = next((n for n in range(level, 1, -1) if level % n == 0 and cuts_samples(n)), 0)
    return [m for m in cluster.meshes(max_axes=3) if len(m) < 3 or m[0] == outermost]


def space(sizes: tuple[int, ...]) -> tuple[roles.Role, ...]:
    """What each axis may do: anything, but the outermost of three, the one with the slowest links, splits samples."""
    inner = (roles.anything,) * min(2, len(sizes))
    return (roles.samples, *inner) if len(sizes) > 2 else inner


def unfolded(mesh: Mesh) -> tuple[int, ...] | None:
    """The same ranks with an axis for each level: 64x16 over nodes of 8 as 64x2x8, where tokens go to experts once to a
    node, or weights are gathered in two steps. None where that is the same mesh, or has more than three axes."""
    sizes = tuple(span.size for axis in mesh.axes for span in axis.spans)
    return sizes if len(mesh.axes) < len(sizes) <= 3 else None
