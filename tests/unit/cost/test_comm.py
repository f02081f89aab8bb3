"""Prices of collectives: laws that any price must obey, published tables, and the steps of a reshard."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.cluster import Cluster, MeshAxis, Span, presets
from autopar.cluster.types import COLLECTIVES
from autopar.cost.comm import (
    Part,
    affine,
    collective_s,
    copy_s,
    group_bytes,
    link_shares,
    sent_once,
    step_s,
    steps_s,
    ways,
)
from autopar.errors import ClusterError
from autopar.layout import Step, parse, steps
from autopar.routing import parts_of_token

from .published import COMPARED, Table

GATHERING = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
ALL = (*COLLECTIVES, "slice", "mask")


def axis_of(text: str, size: int) -> MeshAxis:
    """The innermost axis of `size` devices."""
    cluster = Cluster.parse(text)
    rest = cluster.devices // size
    return cluster.mesh((rest, size) if rest > 1 else (size,)).axes[-1]


@st.composite
def axes(draw: st.DrawFn) -> MeshAxis:
    cluster = Cluster.parse(f"{draw(st.sampled_from(presets()))}:{draw(st.sampled_from((1, 2, 4, 6)))}x8")
    mesh = cluster.mesh(draw(st.sampled_from(cluster.meshes())))
    return draw(st.sampled_from(mesh.axes))


sizes = st.floats(1.0, 1e11)


@given(axes(), st.sampled_from(GATHERING), sizes)
def test_a_collective_takes_shares_of_links_and_a_large_one_all_of_the_slowest(
    axis: MeshAxis, kind: str, nbytes: float
) -> None:
    if axis.size == 1:
        assert not link_shares(kind, nbytes, axis)
    else:
        found = link_shares(kind, nbytes, axis)
        assert set(found) <= {span.level.name for span in axis.spans} and all(
            0.0 <= share <= 1.0 for share in found.values()
        )
        assert max(link_shares(kind, 1e13, axis).values()) > 0.5


@pytest.mark.parametrize("text, kind, size, table, tolerance, fitted", COMPARED)
def test_published_tables(text: str, kind: str, size: int, table: Table, tolerance: float, fitted: bool) -> None:
    axis = axis_of(text, size)
    errors = {nbytes: collective_s(kind, nbytes, axis) / seconds - 1 for nbytes, seconds in table}
    assert max(map(abs, errors.values())) <= tolerance, ("fitted" if fitted else "held out", errors)


@given(axes(), sizes, st.floats(1.0, 100.0))
def test_monotone_and_concave_in_bytes(axis: MeshAxis, nbytes: float, factor: float) -> None:
    for kind in COLLECTIVES:
        small, large = collective_s(kind, nbytes, axis), collective_s(kind, nbytes * factor, axis)
        assert 0 <= small <= large <= small * factor * (1 + 1e-9)


@given(axes(), sizes, st.floats(1.0, 10.0))
def test_faster_links_are_never_slower(axis: MeshAxis, nbytes: float, factor: float) -> None:
    def faster(span: Span) -> Span:
        return Span(dataclasses.replace(span.level, bandwidth_bytes_s=span.level.bandwidth_bytes_s * factor), span.size)

    better = dataclasses.replace(axis, spans=tuple(map(faster, axis.spans)))
    for kind in COLLECTIVES:
        slow, fast = collective_s(kind, nbytes, axis), collective_s(kind, nbytes, better)
        assert slow / factor * (1 - 1e-9) <= fast <= slow * (1 + 1e-9)


@given(axes())
def test_all_reduce_is_about_a_reduce_scatter_and_an_all_gather(axis: MeshAxis) -> None:
    """For large sizes; a switch that adds saves at most half, gloo's all-reduce is better than its other two."""
    if axis.device.kind == "cpu" or axis.size == 1:
        return
    pair = collective_s("reduce_scatter", 1e11, axis) + collective_s("all_gather", 1e11, axis)
    switch = any(p.algorithm == "switch" for span in axis.spans for p in span.level.protocols)
    low = 0.5 if switch and len(axis.spans) < 2 else 0.99
    assert low * pair <= collective_s("all_reduce", 1e11, axis) <= 1.01 * pair


@given(axes(), sizes)
def test_crossing_levels_is_never_cheaper_than_the_outer_level_alone(axis: MeshAxis, nbytes: float) -> None:
    """Each device of a node brings its own link: the outer level alone carries the bytes of one of them."""
    if len(axis.spans) < 2:
        return
    outer = dataclasses.replace(axis, spans=axis.spans[:1], size=axis.spans[0].size)
    inner = dataclasses.replace(axis, spans=axis.spans[1:], size=axis.spans[1].size)
    for kind in GATHERING:
        crossing = collective_s(kind, nbytes, axis) * (1 + 1e-9)
        assert crossing >= collective_s(kind, nbytes / inner.size, outer)
        if kind != "all_to_all":
            assert crossing >= collective_s(kind, nbytes, inner)


def test_the_node_link_is_shared_by_the_devices_of_the_node() -> None:
    """8 groups across 2 nodes, side by side, move 8 tensors in the time in which one group of 16 moves one of 8 times
    the size."""
    across = Cluster.parse("h100:2x8").mesh((2, 8)).axes[0]
    slope = affine("all_gather", across)[-1].slope_s
    assert slope == pytest.approx(0.5 / (50e9 * 0.92))


@given(st.sampled_from(presets()), sizes)
def test_one_device_costs_nothing(name: str, nbytes: float) -> None:
    axis = Cluster.parse(f"{name}:1").mesh((1,)).axes[0]
    assert [collective_s(kind, nbytes, axis) for kind in ALL] == [0.0] * len(ALL)
    assert [link_shares(kind, nbytes, axis) for kind in COLLECTIVES] == [{}] * len(COLLECTIVES)


@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_link_carries_in_its_share_of_the_time_what_a_ring_sends(size: int, nbytes: float) -> None:
    """(N-1)/N of the bytes, at some protocol's efficiency."""
    axis = axis_of("h100:8", size)
    (span,) = axis.spans
    (share,) = link_shares("all_gather", nbytes, axis).values()
    carried = share * collective_s("all_gather", nbytes, axis) * span.bandwidth_bytes_s
    efficiencies = {protocol.efficiency for protocol in span.level.protocols if protocol.algorithm == "ring"}
    assert any(carried * efficiency == pytest.approx(nbytes * (size - 1) / size) for efficiency in efficiencies)


@given(
    st.sampled_from(COLLECTIVES),
    sizes,
    st.floats(1.0, 5.0),
    st.sampled_from((0.0, 1e6, 1e9)),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
@example("all_reduce", 1e9, 5.0, 1e6, [False, False, False, True])
def test_a_price_is_that_of_the_fastest_of_all_ways(
    kind: str, nbytes: float, spill: float, spill_bytes: float, spilling: list[bool]
) -> None:
    """Whichever of the protocols of a level begin at once and take `spill` times as long for each byte above some: such
    a one may be better than others in its start and in its seconds per byte, and slower for many bytes."""
    axis = axis_of("h100:8", 8)
    (span,) = axis.spans
    protocols = tuple(
        dataclasses.replace(protocol, start_s=0.0, spill=spill, spill_bytes=spill_bytes) if slow else protocol
        for protocol, slow in zip(span.level.protocols, itertools.cycle(spilling))
    )
    made = dataclasses.replace(axis, spans=(Span(dataclasses.replace(span.level, protocols=protocols), span.size),))

    def seconds(part: Part) -> float:
        protocol, above = part.protocol, max(0.0, nbytes - part.protocol.spill_bytes)
        return (
            protocol.start_s + part.hops * protocol.hop_s + part.slope_s * ((nbytes - above) + protocol.spill * above)
        )

    assert collective_s(kind, nbytes, made) == pytest.approx(min(seconds(part) for (part,) in ways(kind, made)))


def test_a_copy_reads_and_writes() -> None:
    device = Cluster.parse("v100").device
    assert copy_s(1e9, device) == pytest.approx(
        device.launch_s + 2e9 / (device.memory_bandwidth_bytes_s * device.achievable_bandwidth)
    )


def test_small_messages_do_not_reach_the_bandwidth() -> None:
    axis = axis_of("h100:8", 8)
    rates = [nbytes / collective_s("all_gather", nbytes, axis) for nbytes in (1e4, 1e6, 1e8, 1e10)]
    assert rates == sorted(rates) and rates[0] < rates[-1] / 100
    assert rates[-1] * 7 / 8 / 450e9 == pytest.approx(0.81, rel=0.01)


def test_the_tree_wins_for_small_messages_over_many_nodes() -> None:
    axis = axis_of("h100:64x8", 512)
    assert collective_s("all_reduce", 1e3, axis) < collective_s("all_gather", 1e3, axis) / 3


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(ClusterError, match="mesh axis 'gpu': there is no collective 'gossip'; known: all_reduce, "):
        collective_s("gossip", 1.0, axis_of("h100:8", 8))


MESH = Cluster.parse("h100:2x4").mesh((2, 4))


@pytest.mark.parametrize(
    "kind, axis, before, after, nbytes",
    [
        ("all_gather", 1, "S0,S1", "S0,R", 400),  # the gathered output of a group: half of the tensor
        ("all_reduce", 1, "S0,P", "S0,R", 400),
        ("reduce_scatter", 0, "P,S1", "S0,S1", 200),
        ("all_to_all", 1, "S0,S1", "S0,S2", 400),  # 8 local parts of 100, 4 of them in a group
        ("slice", 1, "S0,R", "S0,S1", 100),
        ("mask", 1, "R,R", "R,P", 800),
    ],
)
def test_bytes_of_a_step(kind: str, axis: int, before: str, after: str, nbytes: float) -> None:
    step = Step(kind, axis, parse(before), parse(after))
    assert group_bytes(step, 800, MESH.sizes) == nbytes
    assert step_s(step, 800, MESH) >= collective_s(kind, nbytes, MESH.axes[axis])


def test_chunks_of_dim_0_need_no_copy_and_others_do() -> None:
    free, copied, split = (Step("all_gather", 1, parse(f"R,{entry}"), parse("R,R")) for entry in ("S0", "S1", "S0/3"))
    gather = collective_s("all_gather", 1e8, MESH.axes[1])
    assert step_s(free, 1e8, MESH) == gather
    assert step_s(copied, 1e8, MESH) == step_s(split, 1e8, MESH) == pytest.approx(gather + copy_s(1e8, MESH.device))


@pytest.mark.parametrize(
    "kind, axis, before, after, copied",
    [
        ("all_gather", 1, "R,S1", "R,R", [800]),
        ("all_gather", 1, "S0,S1", "S0,R", [400]),
        ("reduce_scatter", 1, "S0,P", "S0,S1", [400]),
        ("reduce_scatter", 1, "R,P", "R,S0", []),
        ("all_to_all", 1, "S0,S1", "S0,S2", [100, 100]),
        ("all_to_all", 1, "R,S0", "R,S1", [200]),
        ("all_to_all", 1, "R,S0/3", "R,S1", [200, 200]),
        ("all_reduce", 1, "R,P", "R,R", []),
        ("slice", 1, "R,R", "R,S1", []),
        ("slice", 1, "R,R", "R,O1", []),
        ("broadcast", 1, "S1,O1", "S1,R", []),
        ("mask", 1, "R,R", "R,P", []),
    ],
)
def test_each_end_that_is_not_in_order_of_dim_0_takes_a_copy(
    kind: str, axis: int, before: str, after: str, copied: list[float]
) -> None:
    """Of what the rank has whole on the axis. One that takes or leaves all copies nothing."""
    step = Step(kind, axis, parse(before), parse(after))
    moved = collective_s(kind, 0.0 if after == "R,O1" else group_bytes(step, 8e8, MESH.sizes), MESH.axes[axis])
    copies = (len(copied) * copy_s(1e6 * copied[0], MESH.device)) if copied else 0.0
    assert step_s(step, 8e8, MESH) == pytest.approx(moved + copies)


def test_steps_on_an_axis_of_one_device_cost_nothing() -> None:
    mesh = Cluster.parse("h100:4").mesh((1, 4))
    assert [
        step_s(step, 1e8, mesh)
        for step in (Step("all_gather", 0, parse("S1,R"), parse("R,R")), Step("slice", 0, parse("R,R"), parse("S1,R")))
    ] == [0.0, 0.0]


def test_steps_add_up() -> None:
    way = steps(parse("P,S1"), parse("R,R"), MESH.sizes)
    assert len(way) >= 2
    assert steps_s(way, 1e8, MESH) == pytest.approx(math.fsum(step_s(step, 1e8, MESH) for step in way))
    assert steps_s((), 1e8, MESH) == 0.0


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_what_is_sent_once_to_each_part_is_counted_over_all_choices_of_experts(copies: int) -> None:
    axis, experts = Cluster.parse("h100:4x2").mesh((8,)).axes[0], 16
    choices = list(itertools.combinations(range(experts), copies))

    def counted(parts: int) -> float:
        return sum(len({expert * parts // experts for expert in choice}) for choice in choices) / len(choices)

    once = sent_once(axis, partial(parts_of_token, experts, copies))
    assert once.spans[0].bandwidth_bytes_s / axis.spans[0].bandwidth_bytes_s == pytest.approx(counted(8) / counted(4))
    assert once.spans[-1] == axis.spans[-1]
    assert collective_s("all_to_all", 1e9, once) <= collective_s("all_to_all", 1e9, axis)


@given(st.lists(st.integers(2, 6), min_size=1, max_size=4), st.data())
def test_each_level_but_the_innermost_carries_a_row_once_for_each_part_that_it_is_for(
    sizes: list[int], data: st.DataObject
) -> None:
    """Of 12 ranks in 2 parts of 3 nodes of 2, a row for r(12) ranks goes over the outermost level r(2) times and over
    the next one r(6) times."""
    span = axis_of("h100:1x8", 8).spans[0]
    span = dataclasses.replace(span, level=dataclasses.replace(span.level, bandwidth_bytes_s=1e9))
    axis = dataclasses.replace(
        axis_of("h100:1x8", 8),
        size=math.prod(sizes),
        spans=tuple(dataclasses.replace(span, size=size) for size in sizes),
    )
    readers = {count: data.draw(st.floats(1, count)) for count in itertools.accumulate(sizes, operator.mul)}
    once = sent_once(axis, readers.__getitem__)
    assert [part.size for part in once.spans] == sizes
    for level, part in enumerate(once.spans[:-1]):
        times = readers[math.prod(sizes)] / readers[math.prod(sizes[: level + 1])]
        assert part.bandwidth_bytes_s == pytest.approx(axis.spans[level].bandwidth_bytes_s * times)
    assert once.spans[-1] == axis.spans[-1]
