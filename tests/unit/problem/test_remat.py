"""Problems in which blocks are run again: what is added, what is saved, and what a planner makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.codegen.edges import edges
from autopar.cost.comm import steps_s
from autopar.errors import PlanError
from autopar.onestage import plan
from autopar.planner import Planner
from autopar.problem.build import Model, build
from autopar.problem.remat import LEVELS, levels, rematerialised
from autopar.problem.step_shares import ForwardPrices, MicroPrices
from autopar.recipes import RECIPES
from autopar.request import Request
from autopar.search import ilp
from tests.helpers.planned import graph, planned

HINTS = {"b": 2048}


def _planner(cluster: str = "cpu:1x4", layers: int = 4, **about: object) -> Planner:
    return Planner.of(graph(layers), HINTS, Request(Cluster.parse(cluster), **about))  # type: ignore[arg-type]


def _model(planner: Planner, level: str, recipe: str = "zero3") -> Model:
    planner.remat = levels(planner.program, level)
    return planner.model((4,), RECIPES[recipe].roles, recipe)


@pytest.mark.parametrize("level", ["selective", "full"])
def test_with_nothing_run_again_there_is_as_much_room(level: str) -> None:
    """What is kept of blocks is chosen in that Problem, of the same limit however often a Problem is asked for."""
    planner = _planner(memory_bytes=2**20)
    for limit_bytes in (2**20, 2**19):
        made = _model(planner.anew(replace(planner.request, memory_bytes=limit_bytes)), level)
        assert made.plain is not None
        assert made.problem.memory_limit_bytes == made.plain.memory_limit_bytes == limit_bytes


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "megatron", "tp_sp"])
def test_running_again_costs_time_and_saves_memory_for_every_choice(recipe: str) -> None:
    planner = _planner()
    models = {level: _model(planner, level, recipe).problem for level in LEVELS}
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = tuple(int(rng.integers(len(node.labels))) for node in models["none"].nodes)
        none, selective, full = (models[level].price(choice) for level in LEVELS)
        if none.feasible:
            assert none.time_s <= selective.time_s <= full.time_s
            assert full.memory_bytes <= selective.memory_bytes * (1 + 1e-12) and full.memory_bytes < none.memory_bytes


@pytest.mark.parametrize("level", ["selective", "full"])
def test_seconds_are_those_of_what_the_plan_runs_again(level: str) -> None:
    """The difference in time is the forward of the operators that run again, and of the reshards that edges mark so."""
    planner = _planner()
    plain, model = _model(planner, "none", "tp_sp"), _model(planner, level, "tp_sp")
    choice = ilp.search(plain.problem, time_limit_s=5.0).choice
    forward = ForwardPrices(plain.prices.mesh, plain.prices.device, plain.prices.settings)
    made = replace(planned("tp_sp", (4,)).plan, remat=levels(planner.program, level))
    found = edges(planner.program, made)
    decisions, ops = plain.decode(choice), planner.program.ops
    again_s = sum(forward.op_s(op, decisions[name]) for name, op in ops.items() if found.runs_again(op))
    again_s += sum(
        steps_s(r.forward((4,)), planner.program.bytes_of(r.ref), plain.prices.mesh) * r.count
        for r in found.reshards
        if r.replay == "again" and not r.regathers((4,))
    )
    assert again_s > 0
    added_s = model.problem.price(choice).time_s - plain.problem.price(choice).time_s
    assert added_s == pytest.approx(again_s, rel=1e-6)


def test_a_gathered_weight_is_gathered_for_the_second_run_and_not_once_more() -> None:
    """ZeRO-3: the big weights are gathered twice either way; only vectors before the last product come on top."""
    planner = _planner()
    plain, model = _model(planner, "none"), _model(planner, "full")
    weights = {
        net.name: (net, again)
        for net, again in zip(plain.problem.nets, model.problem.nets, strict=True)
        if net.group >= 0
    }
    for name, (net, again) in weights.items():
        big = max(planner.program.ops[name.rpartition(":")[0]].call.outs[0].sizes) > 512 or "down" in name
        if "weight" in name and big:
            assert np.allclose(net.cost_s, again.cost_s)
    assert any((again.cost_s > net.cost_s).any() for name, (net, again) in weights.items() if "bias" in name)


def test_it_works_on_what_one_microbatch_costs() -> None:
    planner = _planner()
    plain = planner.model((4,), RECIPES["zero3"].roles, "zero3")
    joints = [planner.joints(role, 4) for role in RECIPES["zero3"].roles]
    micro = build(
        planner.program,
        planner.clusters,
        joints,
        MicroPrices(plain.prices.mesh, plain.prices.device, plain.prices.settings),
        1e18,
    )
    forward = ForwardPrices(plain.prices.mesh, plain.prices.device, plain.prices.settings)
    again = rematerialised(micro, forward, levels(planner.program, "full"))
    choice = ilp.search(plain.problem, time_limit_s=5.0).choice
    assert again.problem.price(choice).memory_bytes < micro.problem.price(choice).memory_bytes
    assert again.problem.price(choice).time_s > micro.problem.price(choice).time_s


def test_blocks_are_run_again_where_nothing_fits_without() -> None:
    cluster = Cluster.parse("cpu:1x4")
    least = {
        level: plan(
            graph(), HINTS, Request(cluster, recipe="zero3", remat=level), model="stack", graph_hash="0" * 64
        ).predicted
        for level in LEVELS
    }
    assert least["full"].memory_bytes < least["none"].memory_bytes and least["full"].step_s > least["none"].step_s
    free = cluster.device.usable_memory_bytes / cluster.device.memory_bytes
    between = (least["full"].memory_bytes + least["none"].memory_bytes) / 2
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=int(between / free)))
    made = plan(graph(), HINTS, Request(tight, recipe="zero3"), model="stack", graph_hash="0" * 64)
    assert any("running blocks again takes" in note and " MiB per device" in note for note in made.notes)
    assert made.run_again.startswith("layers_0") and made.predicted.memory_bytes <= tight.device.usable_memory_bytes
    assert plan(graph(), HINTS, Request(cluster, recipe="zero3"), model="stack", graph_hash="0" * 64).remat == {}


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown remat 'some'; known are auto, none, selective, full"):
        Request(Cluster.parse("cpu:1x4"), remat="some")
