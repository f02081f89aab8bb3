"""Clusters of parts: text and files, what they amount to in lockstep, where places lie, and what bad input says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from autopar.cluster import Cluster, orders, pipelines
from autopar.cluster.mixed import join
from autopar.errors import ClusterError

TWO = "h100:2x8+a100-80:2x8"


@pytest.mark.parametrize("text", [TWO, "h100:1x8+h100:1x4", "h100:1x8 + l4:1x6 + a100-40:1x4", "gb200:1x8+h100:2x4"])
def test_round_trip_is_exact_and_json(text: str) -> None:
    cluster = Cluster.parse(text)
    data = json.loads(json.dumps(cluster.to_dict()))
    again = Cluster.from_dict(data)
    assert again == cluster and again.to_dict() == data and hash(again) == hash(cluster)
    assert cluster.label == text.replace(" ", "") and cluster.devices == sum(part.devices for part in cluster.parts)
    assert (
        all(part.label in cluster.describe() for part in cluster.parts)
        and "as slow as the slowest" in cluster.describe()
    )


def test_neighbours_of_one_kind_are_one_part() -> None:
    assert Cluster.parse("h100:1x8+h100:2x8") == Cluster.parse("h100:3x8")
    assert [part.label for part in Cluster.parse("h100:1x8+h100:1x8+l4:1x8").parts] == ["h100:2x8", "l4:1x8"]
    assert len(Cluster.parse("h100:1x8+l4:1x8+h100:1x8").parts) == 3


def test_all_at_once_is_as_slow_as_the_slowest() -> None:
    two, fast, slow = (Cluster.parse(text) for text in (TWO, "h100:2x8", "a100-80:2x8"))
    assert [(level.name, level.size, level.bandwidth_bytes_s) for level in two.levels] == [
        ("node", 4, 25e9),
        ("gpu", 8, 300e9),
    ]
    assert two.device.flops("bfloat16") == slow.device.flops("bfloat16") and two.device.units == slow.device.units
    assert two.device.usable_memory_bytes == min(fast.device.usable_memory_bytes, slow.device.usable_memory_bytes)
    assert two.device.memory_s(1e9) == max(fast.device.memory_s(1e9), slow.device.memory_s(1e9))
    assert two.flops("bfloat16") == 16 * (fast.device.flops("bfloat16") + slow.device.flops("bfloat16"))
    assert two.meshes() == Cluster.parse("a100-80:4x8").meshes()


def test_of_each_rate_the_least_counts() -> None:
    """One device multiplies faster, the other has the faster memory; each dtype is that of the one that is slower in
    it."""
    h100 = Cluster.parse("h100:1x2")
    other = dataclasses.replace(
        h100,
        name="other",
        device=dataclasses.replace(
            h100.device,
            name="other",
            achievable=0.4,
            peak_flops={**h100.device.peak_flops, "float32": 1e15},
            memory_bandwidth_bytes_s=9e12,
            launch_s=1e-6,
        ),
    )
    both = join([h100, other]).device
    assert both.flops("bfloat16") * both.best_share("bfloat16") == pytest.approx(989e12 * 0.4)
    assert both.flops("float32") * both.best_share("float32") == pytest.approx(67e12 * 0.803)
    assert (
        both.memory_bandwidth_bytes_s == h100.device.memory_bandwidth_bytes_s and both.launch_s == h100.device.launch_s
    )


def test_unequal_nodes_are_groups_that_divide_all_of_them() -> None:
    """Consecutive groups of 4 lie within a node of 8 and of 4, groups of 8 do not."""
    cluster = Cluster.parse("h100:1x8+h100:1x4")
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 3), ("gpu", 4)]
    assert (3, 4) in cluster.meshes() and (6, 2) in cluster.meshes()
    assert Cluster.parse("mi300x:1x8+mi300x:1x4").levels[1].bandwidth_bytes_s == pytest.approx(
        Cluster.parse("mi300x:1x8").levels[1].bandwidth_bytes_s * 3 / 7
    )


def test_places_lie_within_parts() -> None:
    cluster = Cluster.parse(TWO)
    at = cluster.places(4, (2, 4))
    assert at.homes == (0, 0, 1, 1) and at.kinds == (0, 2)
    assert at.device(1).name.startswith("H100") and at.device(2).name.startswith("A100")
    assert at.mesh(0).axes[1].bandwidth_bytes_s == 450e9 and at.mesh(3).axes[1].bandwidth_bytes_s == 300e9
    assert at.link(0, 1).bandwidth_bytes_s == 50e9 and at.link(1, 2).bandwidth_bytes_s == 25e9
    assert at.axis((0, 3)).bandwidth_bytes_s == 25e9 and at.axis((0, 1, 2)).size == 3
    assert at.link(3, 0) == at.link(0, 3)


def test_places_of_one_kind_are_those_of_the_mesh() -> None:
    cluster = Cluster.parse("h100:4x8")
    at, line = cluster.places(8, (4,)), cluster.mesh((8, 4)).axes
    assert (
        at.homes == (0,) * 8
        and at.link(1, 2) == line[0]
        and at.axis(range(8)) == line[0]
        and at.mesh(5).axes == line[1:]
    )


@pytest.mark.parametrize("text", [TWO, "h100:1x8+h100:1x4", "h100:1x6+l4:1x9", "h100:1x4+l4:1x3"])
def test_pipelines_are_all_that_fit(text: str) -> None:
    cluster = Cluster.parse(text)
    found = pipelines(cluster, 2)
    assert found and len(set(found)) == len(found)
    for count, sizes in found:
        at = cluster.places(count, sizes)
        assert all(at.mesh(place).sizes == sizes for place in range(count))
        assert [at.homes.count(home) * math.prod(sizes) for home in range(len(cluster.parts))] == [
            part.devices for part in cluster.parts
        ]
    sizes_found = {math.prod(sizes) for _, sizes in found}
    assert sizes_found == {n for n in range(1, 33) if all(part.devices % n == 0 for part in cluster.parts)}


def test_orders_of_parts() -> None:
    assert [c.label for c in orders(Cluster.parse(TWO))] == [TWO, "a100-80:2x8+h100:2x8"]
    assert len(orders(Cluster.parse("h100:1x8+l4:1x8+h100:1x8"))) == 3
    assert len(orders(Cluster.parse("h100:1x8+l4:1x8+v100:1x8+a100-40:1x8"))) == 2
    assert orders(Cluster.parse("h100:2x8")) == [Cluster.parse("h100:2x8")]


FILE = """name = "ours"
[[parts]]
base = "h100:2x8"
[[parts]]
name = "old"
base = "a100-40:4x4"
[parts.device]
usable_memory = 0.85
[link]
bandwidth_bytes_s = 2.5e9
latency_s = 30e-6
source = "20 Gb/s"
"""


def test_a_file_lists_parts_and_what_joins_them(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    cluster = Cluster.parse(path)
    assert (cluster.label, [part.label for part in cluster.parts]) == ("ours", ["h100:2x8", "old:4x4"])
    assert cluster.parts[1].device.usable_memory == 0.85 and cluster.levels[0].bandwidth_bytes_s == 2.5e9
    assert cluster.places(8, (4,)).link(3, 4).bandwidth_bytes_s == 2.5e9
    assert [c.label for c in orders(cluster)] == ["ours", "ours"]
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_a_file_of_parts_takes_no_sizes(tmp_path: Path) -> None:
    """Its levels were of these sizes, its parts of their own: a cluster of 4 devices was planned for 32."""
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    with pytest.raises(ClusterError, match=r"ours has parts of h100:2x8 and old:4x4, each with sizes .* '1x4' cannot"):
        Cluster.parse(f"{path}:1x4")


def test_a_file_may_be_a_part(tmp_path: Path) -> None:
    path = tmp_path / "lone.toml"
    path.write_text('name = "lone"\nbase = "l4:1x4"\n')
    assert Cluster.parse(f"{path}+h100:1x4").label == "lone:1x4+h100:1x4"


@pytest.mark.parametrize(
    "text, message",
    [
        ("h100:2x8+h900:1x8", r"cluster 'h100:2x8\+h900:1x8': there is no preset 'h900'; known: a100-40"),
        ("h100:2x8+a100-80:0x8", "does not name sizes of node x gpu"),
        ("h100:2x8+", "there is no preset ''"),
        ("h100:1x4+cpu:1x4", "h100:1x4 is cuda and cpu:1x4 is cpu; ranks of one program run on one kind of backend"),
        ("none.toml+h100:1x8", "cluster file none.toml: cannot be read"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ('[[parts]]\nbase = "h100:2x8"\n', "parts is .*; wanted a list of two or more tables"),
        ("parts = 5\n", "parts is 5; wanted a list"),
        (
            'speed = 5\n[[parts]]\nbase = "h100"\n[[parts]]\nbase = "l4"\n',
            "cluster: unknown key 'speed'; known: parts, name, link",
        ),
        ('[[parts]]\nbase = "h100"\n[[parts]]\nbase = "h900"\n', "part 1: cluster 'h900': there is no preset"),
        ('[[parts]]\nbase = "h100"\n[[parts]]\nbase = "l4"\nwatts = 5\n', "part 1: the file: unknown key 'watts'"),
        ('link = 5\n[[parts]]\nbase = "h100"\n[[parts]]\nbase = "l4"\n', "link is 5; wanted a table"),
        (
            '[link]\nbandwidth_bytes_s = 5\nlatency_s = 1e-6\n[[parts]]\nbase = "h100"\n[[parts]]\nbase = "l4"\n',
            "bandwidth_bytes_s is 5; wanted 1e.06",
        ),
        (
            '[[parts]]\nbase = "h100"\n[[parts]]\nbase = "l4+h100"\n',
            "part 1: the file: base is 'l4.h100'; wanted a preset",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=f"(?s)bad.toml: .*{message}"):
        Cluster.parse(path)


def test_parts_without_a_network() -> None:
    h100 = Cluster.parse("h100:1x4")
    lone = Cluster("lone", h100.levels[1:], h100.device)
    with pytest.raises(ClusterError, match=r"part 'lone:4' has only level 'gpu'.*give \[link\]"):
        join([h100, lone])
    assert join([h100, lone], h100.levels[0]).devices == 8
    with pytest.raises(ClusterError, match="wanted two or more"):
        join([h100])
    with pytest.raises(ClusterError, match="a part has parts itself"):
        join([h100, Cluster.parse(TWO)])


@pytest.mark.parametrize(
    "count, sizes, message", [(3, (4,), "3 places of .4,. are not its 32 devices"), (1, (3,), "are not its 32 devices")]
)
def test_places_that_cannot_be(count: int, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(TWO).places(count, sizes)


def test_a_place_in_two_parts() -> None:
    with pytest.raises(ClusterError, match=r"2 places of .6,. do not lie within its parts of 8, 4 devices"):
        Cluster.parse("h100:1x8+h100:1x4").places(2, (6,))
