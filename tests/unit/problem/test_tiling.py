"""Which weights are offered in tiles, what they cost, and how a plan says so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.errors import InfeasibleError
from autopar.layout import parse
from autopar.onestage import plan
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.problem.tiling import tiled
from autopar.recipes import roles
from autopar.recipes.kinds import SAMPLE, kind
from autopar.report.explain import alternatives, choice_of, find
from autopar.report.weights import weights
from autopar.request import Request
from autopar.rules.algorithms import agree
from autopar.rules.language import Option, Use
from autopar.rules.tiles import counts, in_tiles, tiles
from models.mlp import build
from tests.helpers.planned import planned

LAYER = "layers_0/linear_default_1"


@cache
def graph() -> Captured:
    """Two layers of 4096 on 8 devices of an H100 node."""
    with torch.device("meta"):
        return capture(*build(64, 4096, 2, 10, 64))


def planner(memory_bytes: float, planned: dict[str, tuple[str, ...]] | None = None) -> Planner:
    """For devices of so much memory."""
    request = Request(Cluster.parse("h100:1x8"), Settings(), memory_bytes=memory_bytes)
    return Planner.of(graph().gm, {**graph().hints, "b": 64}, request, planned)


def test_only_large_weights_are_offered_in_tiles() -> None:
    made = planner(2**30)
    op = made.program.ops[LAYER]
    assert [counts(op.call, 8, nbytes) for nbytes in (2**31, 2**30, 2**27)] == [(), (), (2, 4, 8)]
    assert counts(op.call, 1, 2**20) == () and max(counts(op.call, 8, 2**20)) == 512  # one row of each shard
    assert made.joints(roles.zero3, 8) and made.table(8, placed=False, tiled=True) == made.table(8, placed=False)
    few = planner(2**27)
    offered = [option for option in few.table(8, placed=False, tiled=True)[LAYER] if tiles(option.run) > 1]
    assert [option.factor for option in offered] == ["_0/tiles2", "_0/tiles4", "_0/tiles8"]
    assert {kind(op, option) for option in offered} == {SAMPLE} and all(
        option.ins[1] == Use("S0", "S0") for option in offered
    )
    index = next(i for i, cluster in enumerate(few.clusters) if cluster.root.name == LAYER)
    chosen = {
        role: {tiles(joint.options[-1].run) for joint in few.joints(role, 8)[index]}
        for role in (roles.zero3, roles.data, roles.tensor)
    }
    assert chosen == {roles.zero3: {1, 2, 4, 8}, roles.data: {1}, roles.tensor: {1}}


def test_no_second_axis_may_cut_the_rows_of_the_weight() -> None:
    """Of [o, i] with o cut on two axes, tiles of the outer one are no shard of the inner one."""
    data = Option("b", (Use("S0", "S0"), Use("R", "P")), (Use("S0", "S0"),), split=True)
    (one,) = in_tiles(torch.ops.aten.linear.default, [data], (2,))
    columns = Option("o", (Use("R", "P"), Use("S0", "S0")), (Use("S1", "S1"),), split=True)
    inner = Option("i", (Use("S1", "S1"), Use("S1", "S1")), (Use("P", "R"),), split=True)
    assert agree((one, data)) and agree((data, one)) and agree((one, inner))
    assert not agree((one, columns)) and not agree((columns, one)) and not agree((one, one))


def test_more_tiles_take_less_memory_and_as_many_collectives_more() -> None:
    made = planner(2**27)
    model = made.model((8,), (roles.zero3,), "zero3")
    index = find(model, LAYER)
    whole = tuple(0 for _ in model.clusters)
    rows = {row.label: row for row in alternatives(model, whole, index)}
    times = [rows[label].step_s for label in ("_0/tiles2", "_0/tiles4", "_0/tiles8")]
    held = [rows[label].memory_bytes for label in ("_0/tiles2", "_0/tiles4", "_0/tiles8")]
    assert held == sorted(held, reverse=True) and min(times) > 0
    node = model.problem.nodes[index]
    assert node.live_bytes is not None and [
        float(b) * n / 2**26 for b, n in zip(node.live_bytes[-3:], (2, 4, 8), strict=True)
    ] == [1.0, 1.0, 1.0]


def test_plans_say_what_is_gathered_in_tiles() -> None:
    request = Request(Cluster.parse("h100:1x8"), Settings(), recipe="zero3", memory_bytes=2**27)
    made = plan(graph().gm, {**graph().hints, "b": 64}, request, model="mlp", graph_hash=graph().graph_hash)
    ((op, count),) = tiled(made.runs).items()
    line = next(
        line
        for line in emit(graph().gm, made, Names.of(graph())).splitlines()
        if f"{count} tiles, all-gather on gpu: {count} x " in line
    )
    assert (
        f"backward all-gather on gpu: {count} x {67.1 / count:.3g} MB" in line
        and f"backward reduce-scatter on gpu: {count} x " in line
    )
    assert (
        op == LAYER
        and made.notes[0] == f"too large to be gathered whole, gathered and used in tiles: linear.weight in {count}"
    )
    (weight,) = [w for w in weights(planner(2**27).program, made) if w.shape == (4096, 4096)]
    assert weight.uses == (f"gathered in {count} tiles",) and parse(weight.layout) == ("S0",)
    known = planner(2**40, made.runs)  # explained where nothing is large
    model = known.model((8,), (roles.anything,), "explain")
    assert sum(row.chosen for row in alternatives(model, choice_of(model, made), find(model, LAYER))) == 1


class Layers(nn.Module):
    """Linear layers of unlike sizes: one of 4, three of 8 and more of fewer MiB."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 1024, 1024, 2048, 1024, 512, 4096, 256)
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x**2).sum()


def test_as_much_is_gathered_in_tiles_as_memory_wants() -> None:
    captured = capture(Layers(), (torch.zeros(16, 64),))

    def zero3(memory_bytes: float) -> Plan:
        request = Request(Cluster.parse("h100:1x8"), Settings(), recipe="zero3", memory_bytes=memory_bytes)
        return plan(captured.gm, {**captured.hints, "b": 16}, request, model="layers", graph_hash=captured.graph_hash)

    free = zero3(1e12)
    made = [zero3(room * free.predicted.memory_bytes) for room in (0.9, 0.75, 0.6, 0.45)]
    found = [len(tiled(one.runs)) for one in (free, *made)]
    assert found[0] == 0 < found[1] and found == sorted(found) and found[-1] >= 5
    times = [one.predicted.step_s for one in (free, *made)]
    # a few tiles hide better than whole gathers, which a Problem does not see
    assert times[1:] == sorted(times[1:]) and times[0] < min(times[2:])
    assert all(
        one.predicted.memory_bytes <= room * free.predicted.memory_bytes
        for one, room in zip(made, (0.9, 0.75, 0.6, 0.45), strict=True)
    )
    with pytest.raises(InfeasibleError):
        zero3(0.3 * free.predicted.memory_bytes)


def test_ordinary_models_have_no_such_choice() -> None:
    assert not tiled(planned("zero3", (4,)).plan.runs)
    request = Request(Cluster.parse("h100:1x8"), Settings())
    # Llama-3-405B
    assert not any(request.limit_bytes < 16 * nbytes for nbytes in (2 * 16384 * 53248, 2 * 128256 * 16384))


@pytest.mark.parametrize("frozen", ["weight", "rows"])
def test_what_has_no_gradient_sends_less_back(frozen: str) -> None:
    made = planner(2**27)
    op, options = made.program.ops[LAYER], made.table(8, placed=False, tiled=True)[LAYER]
    option = next(o for o in options if tiles(o.run) == 4)
    prices = made.model((8,), (roles.zero3,), "zero3").prices
    ins = list(op.call.ins)
    ins[frozen == "weight"] = replace(ins[frozen == "weight"], grad=False)
    call = replace(op.call, args=(ins[0], ins[1], *op.call.args[2:]))
    other = replace(op, call=call, name=f"{op.name}/{frozen}")
    assert prices.op_s(other, (option,)) < prices.op_s(op, (option,))


def test_others_hide_under_its_work_not_under_its_collectives() -> None:
    made = planner(2**27)
    op, options = made.program.ops[LAYER], made.table(8, placed=False, tiled=True)[LAYER]
    prices = made.model((8,), (roles.zero3,), "zero3").prices
    for option in options:
        if tiles(option.run) > 1:
            work_s = sum(made.kernels.seconds(op, (option,), (8,))) * op.count
            whole_s, room_s = prices.work_s(op, (option,))
            assert 0 <= room_s < prices.overlap * work_s < whole_s
