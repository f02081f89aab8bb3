"""Parameters and optimizer state on the host: less memory, priced copies and a priced step, refused where hosts are not
known or too small."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import joint
from autopar.bestfirst import PRICE_TOLERANCE
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.joint import offload_gain
from autopar.joint.pareto import frontier
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.memory import hosts, predict
from autopar.plan import Plan
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.recipes.offload import OFFLOADS
from autopar.request import Request
from autopar.simulate import simulate
from tests.helpers.captures import captured_once
from tests.helpers.planned import BATCH, graph

CLUSTER = Cluster.parse("cpu:1x4")


def _planned(recipe: str, cluster: Cluster = CLUSTER, mode: str = "train") -> Plan:
    return joint.plan(
        graph(),
        {"b": BATCH},
        Request(cluster, Settings(mode), recipe=recipe, time_limit_s=10.0),
        model="stack",
        graph_hash="0" * 64,
    )


def _with(**host: float) -> Cluster:
    return replace(CLUSTER, device=replace(CLUSTER.device, **host))


def test_the_device_keeps_weights_and_gradients_and_the_step_pays_for_the_host() -> None:
    plain, made = _planned("zero1"), _planned("zero_offload")
    assert (
        made.offload and not plain.offload and made.strategy == "zero_offload" and "rest on the host" in made.notes[-1]
    )
    assert made.predicted.memory_bytes < plain.predicted.memory_bytes
    later_s = simulate(graph(), made).step_s - simulate(graph(), plain).step_s
    assert later_s == pytest.approx(made.predicted.step_s - plain.predicted.step_s, rel=0.01) and later_s > 0
    slower = _planned("zero_offload", _with(host_link_bytes_s=1e8))
    elements = 4 * (2 * 512 + 512 * 2048 * 2 + 2048 + 512) + 512 * 8 + 8
    # a quarter of all gradients down, of all parameters up
    more_s = 2 * 4 * elements / 4 * (1 / 1e8 - 1 / CLUSTER.device.host_link_bytes_s)
    assert slower.predicted.step_s - made.predicted.step_s == pytest.approx(more_s, rel=0.01)


def test_optimizer_state_alone_on_the_host() -> None:
    """The device keeps parameters and gradients, and brings the state of one parameter at a time; the price is both
    ways over the link."""
    plain, made = _planned("zero1"), _planned("optimizer_offload")
    assert (
        made.offload == "optimizer"
        and made.strategy == "optimizer_offload"
        and "optimizer state rests on the host, 16 MiB for each device" in made.notes[-1]
    )
    assert _planned("zero_offload").predicted.memory_bytes < made.predicted.memory_bytes < plain.predicted.memory_bytes
    elements = 4 * (2 * 512 + 512 * 2048 * 2 + 2048 + 512) + 512 * 8 + 8
    # two values of a quarter of all elements, there and back
    brought_s = 2 * 2 * 4 * elements / 4 / CLUSTER.device.host_link_bytes_s
    assert made.predicted.step_s - plain.predicted.step_s == pytest.approx(brought_s, rel=0.01)
    assert simulate(graph(), made).step_s - simulate(graph(), plain).step_s == pytest.approx(brought_s, rel=0.01)


def test_what_is_not_known_or_too_small_is_refused() -> None:
    with pytest.raises(PlanError, match=r"needs to know the hosts of .*host_memory_bytes"):
        _planned("zero_offload", _with(host_memory_bytes=0))
    with pytest.raises(
        InfeasibleError, match=r"zero_offload needs 32\.1 MiB of the host for each device, 9\.54 MiB are there"
    ):
        _planned("zero_offload", _with(host_memory_bytes=10_000_000))
    with pytest.raises(PlanError, match="mode inference has none"):
        _planned("zero_offload", mode="inference")


@pytest.mark.parametrize("name", OFFLOADS)
def test_what_cannot_be_is_said_of_the_recipe_that_was_asked_for(name: str) -> None:
    def planned(mesh: tuple[int, ...] | None, batch: int) -> None:
        joint.plan(
            graph(),
            {"b": batch},
            Request(CLUSTER, Settings(), recipe=name, mesh=mesh),
            model="stack",
            graph_hash="0" * 64,
        )

    with pytest.raises(PlanError, match=rf"recipe {name} needs a mesh of 1 axis, got \(2, 2\)"):
        planned((2, 2), BATCH)
    with pytest.raises(PlanError, match=rf"recipe {name} splits the samples over 4 ranks .* use a batch of 4 or 8"):
        planned(None, 6)


GPUS = Cluster.parse("h100:1x4")


def _searched(memory_bytes: float, cluster: Cluster = GPUS, batch: int = 256) -> Plan:
    request = Request(cluster, Settings(), mesh=(4,), memory_bytes=memory_bytes, time_limit_s=60.0)
    return joint.plan(graph(), {"b": batch}, request, model="stack", graph_hash="0" * 64)


def test_the_search_goes_to_the_host_only_where_nothing_else_fits_or_that_is_faster() -> None:
    """A quarter of parameters, gradients and optimizer state is 34 MB, without the state 17. State goes over the link
    both ways, gradients one way and parameters the other: half as much, which pays where the host steps fast. 60 MB
    hold more samples where blocks run again, which state on the host would not pay for."""
    assert not _searched(60e6, batch=BATCH).offload
    stepping = replace(GPUS, device=replace(GPUS.device, host_bandwidth_bytes_s=3e12))
    for cluster, held in ((GPUS, "optimizer"), (stepping, "parameters")):
        made = _searched(28e6, cluster)
        assert made.offload == held and made.predicted.memory_bytes <= 28e6, made.strategy
        assert re.search(
            r"on the host, [\d.]+ MiB for each device, because nothing else fits: [\d.]+ MiB per device are missing",
            made.notes[-1],
        )
        assert all(other.why for other in made.alternatives if other.step_s is None)


@pytest.mark.parametrize(
    ("memory_bytes", "held"), [(1_600_000, ""), (2_000_000, "parameters"), (2_400_000, "optimizer")]
)
def test_offloading_is_tried_where_a_plan_of_one_stage_fits_that_runs_nothing_again(
    memory_bytes: int, held: str
) -> None:
    """One sample of 64 rows cannot be cut, and over slow links one device computes all of it faster than two share it.
    The weights fit a device, with gradients and optimizer state only half of them do."""
    base = Cluster.parse("h100:1x2")
    levels = tuple(replace(each, bandwidth_bytes_s=1e-4 * each.bandwidth_bytes_s) for each in base.levels)
    slow = replace(base, levels=levels, device=replace(base.device, memory_bytes=memory_bytes, usable_memory=1.0))
    rows = torch.zeros(1, 64, 64)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))

    def planned(cluster: Cluster) -> Plan:
        with captured_once("two layers, 64 rows"):
            return autopar.compile(
                model, cluster, (rows, rows), loss_fn=nn.functional.mse_loss, mesh=(2,), time_limit_s=60.0
            ).plan

    made, there = planned(slow), planned(replace(slow, device=replace(slow.device, host_memory_bytes=0)))
    assert (made.offload, there.strategy, there.offload) == (held, "tp", "")
    assert not there.remat and there.microbatches == 1
    assert made.predicted.memory_bytes <= memory_bytes
    assert (made.predicted.step_s < there.predicted.step_s / 4) == bool(held)
    assert not held or "with all of it on devices" in made.notes[-1]


def test_no_host_no_offload() -> None:
    """Hosts of which the cluster says nothing are not used, nor is the memory of CPU ranks, which is the host's."""
    for cluster in (replace(GPUS, device=replace(GPUS.device, host_memory_bytes=0)), CLUSTER):
        with pytest.raises(InfeasibleError) as failed:
            _searched(28e6, cluster)
        assert "on the host" not in str(failed.value)
    with pytest.raises(
        InfeasibleError, match="with parameters, gradients and optimizer state on the host: no plan fits"
    ):
        _searched(8e6)


@pytest.mark.slow
def test_a_fast_host_wins_where_blocks_would_run_again() -> None:
    """With the host's memory as fast as the device's, running blocks again costs more than the step there."""
    fast = replace(GPUS, device=replace(GPUS.device, host_link_bytes_s=450e9, host_bandwidth_bytes_s=3e12))
    made = _searched(60e6, fast, BATCH)
    assert made.offload and "with all of it on devices" in made.notes[-1]
    # here something fits that runs nothing again: with less room than the device has, and no faster
    roomier = _searched(64e6, fast, BATCH)
    assert roomier.predicted.step_s <= made.predicted.step_s * (1 + PRICE_TOLERANCE)
    assert made.predicted.step_s < _searched(60e6, batch=BATCH).predicted.step_s


def _slow_links() -> Cluster:
    """Two nodes of one device, between which gradients take longer than anything else: stages send activations only."""
    cluster = Cluster.parse("h100:2x1")
    return replace(cluster, levels=(replace(cluster.levels[0], bandwidth_bytes_s=2e8), cluster.levels[1]))


@pytest.mark.parametrize(
    ("held", "memory_bytes", "batch", "space"),
    [("optimizer", 60e6, 16, "naive"), pytest.param("parameters", 50e6, 64, "search", marks=pytest.mark.slow)],
)
def test_pipelines_rest_on_the_host(held: str, memory_bytes: float, batch: int, space: str) -> None:
    """Each place steps what its own stages have; the step ends when the slowest has, in the simulation too. Of 16
    samples one microbatch is faster than two, which read all weights twice and send twice."""
    request = Request(_slow_links(), Settings(), memory_bytes=memory_bytes, time_limit_s=60.0)
    made = joint.plan(graph(), {"b": batch}, request, model="stack", graph_hash="0" * 64)
    assert (made.offload, made.places, made.strategy) == (held, 2, f"{space}, {held} on the host")
    assert (
        made.predicted.memory_bytes <= memory_bytes
        and re.search(r"on the host, up to [\d.]+ MiB for each device", made.notes[-1])
        and "because nothing else fits" in made.notes[-1]
    )
    program = read(graph(), made.hints, training=True)
    on_hosts = hosts.of_places(program, made)
    values = {"optimizer": 2, "parameters": 4}[held]
    assert sum(on_hosts) == 4 * values * (4 * (2 * 512 + 512 * 2048 * 2 + 2048 + 512) + 512 * 8 + 8)
    assert (
        max(on_hosts)
        == hosts.of_a_device(program, made)
        == max(place.host_bytes for place in predict(program, made).places)
    )
    ran = simulate(graph(), made)
    assert ran.step_s == pytest.approx(made.predicted.step_s, rel=0.01)
    # seconds for each byte there: over the link, and of the pass on the host
    moved = {"optimizer": 2 / 45e9, "parameters": 0.5 / 45e9 + 7 / 4 / 54e9}[held]
    for place, nbytes in zip(ran.places, on_hosts, strict=True):
        assert place.optimizer_s == pytest.approx(moved * nbytes, rel=0.06)


def test_the_host_of_a_node_is_for_the_ranks_of_all_its_places() -> None:
    """A head of its own place has little on the host: the node has room for it and the blocks, a node of one device has
    not."""
    request = Request(_slow_links(), Settings(), memory_bytes=60e6, time_limit_s=60.0)
    made = joint.plan(graph(), {"b": 16}, request, model="stack", graph_hash="0" * 64)
    uneven = replace(
        made, stages=(replace(made.stages[0], blocks={"layers_0": (0, 4)}), replace(made.stages[1], blocks={}))
    )
    program = read(graph(), made.hints, training=True)
    most, least = hosts.of_places(program, uneven)
    assert most > 100 * least
    together = replace(uneven, cluster=Cluster.parse("h100:1x2").to_dict())
    assert hosts.of_a_device(program, uneven) == most and hosts.of_a_device(program, together) == (most + least) / 2


def test_what_fits_no_way_says_what_hosts_lack() -> None:
    cluster = _slow_links()
    small = replace(cluster, device=replace(cluster.device, host_memory_bytes=30_000_000))
    with pytest.raises(InfeasibleError) as failed:
        joint.plan(
            graph(),
            {"b": 16},
            Request(small, Settings(), memory_bytes=60e6, time_limit_s=60.0),
            model="stack",
            graph_hash="0" * 64,
        )
    assert re.search(
        r"parameters on the host needs 64\.2 MiB of the host for each device, 28\.6 MiB are there", str(failed.value)
    )


def test_contexts_that_share_results_have_all_changes_that_they_were_derived_by() -> None:
    """A division of runs was lost where the same offloading had been asked for without it."""
    context = SearchContext(graph(), {"b": 16}, Request(GPUS, Settings(), time_limit_s=60.0))
    scope = next(iter(context.whole.program.runs))
    hosted, parted = context.hosted("optimizer"), context.parted({scope: {f"{scope}_2": 2}})
    both = parted.hosted("optimizer")
    assert [list(each.whole.program.runs) for each in (hosted, parted, both)] == [[scope], *[[scope, f"{scope}_2"]] * 2]
    assert hosted.update_s > 1.01 * context.update_s and parted.update_s == context.update_s
    assert both.update_s == pytest.approx(hosted.update_s)
    assert len({unit.name for unit in both.units}) == 1 + len({unit.name for unit in context.units})
    assert context.limited(1e9).hosted("optimizer").limit_bytes == 1e9


def test_what_a_step_can_gain_at_most() -> None:
    """With 50 times as many bytes of activations as of state, room for the state is had for a fiftieth of what running
    all blocks again takes, twice that to be sure; nothing is known of plans that run all of them again, nor where too
    little is kept to make room."""
    context = SearchContext(graph(), {"b": 1 << 15}, Request(GPUS, Settings(), time_limit_s=60.0))
    there, alone = context.hosted("optimizer"), Shape(1, (4,), 1)
    assert offload_gain.least_s(there, alone, "none") == 0  # nothing to compare with
    context.best_s = 1.0
    there = context.hosted("optimizer")
    back_bytes = (context.rest_bytes - there.rest_bytes) / 4
    again_s = context.work(1, "full").step_s(4, 1, 1) - context.work(1).step_s(4, 1, 1)
    freed_bytes = context.held_bytes(alone, "none") - context.held_bytes(alone, "full")
    gained_s = 1 - offload_gain.least_s(there, alone, "none") + there.update_s - context.update_s
    assert back_bytes < freed_bytes / 8 and gained_s == pytest.approx(2 * again_s * back_bytes / freed_bytes)
    assert offload_gain.least_s(there, alone, "full") == 0
    assert offload_gain.least_s(there, Shape(1, (4,), 64), "none") == 0
    assert 1 - offload_gain.least_s(there, Shape(4, (1,), 8), "none") == pytest.approx(
        1 - offload_gain.least_s(there, Shape(1, (4,), 2), "none")
    )


def test_less_memory_of_devices_for_more_time() -> None:
    """The frontier goes on where all of it on devices ends."""
    plans = frontier(
        graph(),
        {"b": 64},
        Request(Cluster.parse("h100:1x1"), Settings(), time_limit_s=60.0),
        model="stack",
        graph_hash="0" * 64,
    )
    assert [plan.offload for plan in plans] == ["", "optimizer"]
    assert (
        plans[0].predicted.step_s < plans[1].predicted.step_s
        and plans[0].predicted.memory_bytes > plans[1].predicted.memory_bytes
    )
    forced = Request(Cluster.parse("cpu:1x4"), Settings(), recipe="optimizer_offload", time_limit_s=60.0)
    assert {plan.strategy for plan in frontier(graph(), {"b": 64}, forced, model="stack", graph_hash="0" * 64)} == {
        "optimizer_offload"
    }


def test_what_is_to_be_run_again_is_so_on_the_host_too() -> None:
    """A host as fast as the device makes running nothing again on it faster, which is not what was asked for."""
    fast = replace(GPUS, device=replace(GPUS.device, host_link_bytes_s=450e9, host_bandwidth_bytes_s=3e12))
    request = Request(fast, Settings(), mesh=(4,), memory_bytes=60e6, time_limit_s=60.0, remat="full")
    made = joint.plan(graph(), {"b": 256}, request, model="stack", graph_hash="0" * 64)
    assert set(made.remat) == {"layers_0"}


def test_nothing_is_looked_for_on_the_host_when_time_is_up_and_a_plan_fits() -> None:
    """One timer for all of a search: what is left out for want of time is said."""
    fast = replace(GPUS, device=replace(GPUS.device, host_link_bytes_s=450e9, host_bandwidth_bytes_s=3e12))
    request = Request(fast, Settings(), mesh=(4,), memory_bytes=60e6, time_limit_s=1e-3)
    made = joint.plan(graph(), {"b": BATCH}, request, model="stack", graph_hash="0" * 64)
    assert not made.offload and made.predicted.memory_bytes <= 60e6
    assert [note for note in made.notes if note.startswith("time was up (0.001 s)")]
    assert [other.name for other in made.alternatives if other.why.startswith("time was up")] == [
        "search",  # no pipeline was priced either
        "optimizer on the host",
        "parameters on the host",
    ]


def test_where_nothing_fits_devices_the_host_has_as_much_time_again() -> None:
    request = Request(GPUS, Settings(), mesh=(4,), memory_bytes=28e6, time_limit_s=1e-3)
    made = joint.plan(graph(), {"b": 256}, request, model="stack", graph_hash="0" * 64)
    assert made.offload and made.predicted.memory_bytes <= 28e6


def test_no_level_that_is_asked_for_is_faster_than_what_is_found() -> None:
    """In 64 MB the fastest plan has its state on the host and most blocks run again. The glance there is above the
    limit when its memory is walked, and the next try has less room than anything takes."""

    def step_s(remat: str) -> float:
        request = Request(Cluster.parse("h100:1x2"), Settings(), memory_bytes=64e6, time_limit_s=60.0, remat=remat)
        return joint.plan(graph(), {"b": BATCH}, request, model="stack", graph_hash="0" * 64).predicted.step_s

    assert step_s("auto") <= min(step_s("none"), step_s("selective"), step_s("full")) * (1 + PRICE_TOLERANCE)
