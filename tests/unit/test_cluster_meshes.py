"""Meshes of a cluster: their axes, and the levels that these span."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, Level, Protocol
from autopar.errors import ClusterError


def test_meshes_of_8x8() -> None:
    found = Cluster.parse("h100:8x8").meshes()
    assert found[:2] == [(64,), (8, 8)]
    assert found[6:10] == [(8, 4, 2), (8, 2, 4), (4, 2, 8), (2, 4, 8)]
    assert len(found) == len(set(found)) == 16  # ordered factorisations of 2^6 into 1, 2, 3 factors: 1 + 5 + 10
    assert Cluster.parse("h100:8x8").meshes(1) == [(64,)]
    assert Cluster.parse("cpu:1").meshes() == [(1,)]


@pytest.mark.parametrize(
    "sizes, names",
    [
        ((64,), ("a0",)),
        ((8, 8), ("node", "gpu")),
        ((8, 2, 4), ("node", "a1", "a2")),
        ((4, 2, 8), ("a0", "a1", "gpu")),
    ],
)
def test_axis_names(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    assert Cluster.parse("h100:8x8").mesh(sizes).names == names


def test_axes_know_their_levels() -> None:
    first, last = Cluster.parse("h100:8x8").mesh((4, 16)).axes
    assert [(span.level.name, span.size) for span in first.spans] == [("node", 4)]
    assert [(span.level.name, span.size) for span in last.spans] == [("node", 2), ("gpu", 8)]
    assert last.bandwidth_bytes_s == 50e9
    assert str(Cluster.parse("h100:8x8").mesh((8, 8))) == "node=8, gpu=8"
    single = Cluster.parse("cpu:1").mesh((1,)).axes[0]
    assert single.spans == () and single.bandwidth_bytes_s == math.inf and single.latency_s == 0.0


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((3, 2), r"mesh \(3, 2\) does not multiply to its 12 devices"),
        ((), "does not multiply"),
        ((-3, -4), "does not multiply"),
        ((3, 4), r"an axis of mesh \(3, 4\) straddles a level.*node x gpu; possible: \(12,\), \(2, 6\)"),
    ],
)
def test_a_mesh_that_cannot_be(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.parse("h100:2x6").mesh(sizes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 3))
def test_meshes_agree_with_brute_force(levels: list[int], max_axes: int) -> None:
    """Each axis group, seen as device numbers, splits every level evenly: exactly those meshes are offered."""
    base = Cluster.parse("h100").levels[1]
    named = tuple(dataclasses.replace(base, name=f"l{i}", size=n) for i, n in enumerate(levels))
    cluster = Cluster("c", named, Cluster.parse("h100").device)
    found = cluster.meshes(max_axes)
    assert found == cluster.meshes(max_axes)
    for sizes in found:
        mesh = cluster.mesh(sizes)
        assert mesh.sizes == sizes and mesh.devices == cluster.devices and len(set(mesh.names)) == len(sizes)
        for index, axis in enumerate(mesh.axes):
            assert math.prod(span.size for span in axis.spans) == axis.size
            stride = math.prod(sizes[index + 1 :])
            assert _members_per_level([k * stride for k in range(axis.size)], levels) == _spans_by_level(
                axis.spans, levels
            )


def _members_per_level(group: list[int], levels: list[int]) -> list[int]:
    """How many parts of each level a group of device numbers touches inside one part of the next outer level."""
    out, outer = [], 1
    for index in range(len(levels)):
        below = math.prod(levels[index + 1 :])
        touched = len({device // below for device in group})
        out.append(touched // outer)
        outer = touched
    return out


def _spans_by_level(spans: tuple[Any, ...], levels: list[int]) -> list[int]:
    sizes = {span.level.name: span.size for span in spans}
    return [sizes.get(f"l{i}", 1) for i in range(len(levels))]


def test_a_mesh_topology_gives_a_part_of_the_links() -> None:
    rows = (Protocol("r", "ring", 0.0, 0.0, 1.0), Protocol("d", "direct", 0.0, 0.0, 1.0))
    level = Level("gpu", 8, 448e9, rows, topology="mesh")
    assert [level.pair_bandwidth_bytes_s(n) for n in (2, 8)] == [64e9, 448e9]


@pytest.mark.parametrize("count", [1, 8, 12])
def test_a_line_is_devices_of_the_innermost_level(count: int) -> None:
    cluster = Cluster.parse("h100:2x8")
    line = cluster.line(count)
    assert (line.devices, line.device) == (count, cluster.device)
    assert line.levels == (dataclasses.replace(cluster.levels[-1], size=count),)
