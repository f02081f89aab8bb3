"""What a microbatch costs and what a step costs once make up the whole, reshard by reshard."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.planner import Planner
from autopar.problem.at_rest import EACH, Resting
from autopar.problem.hiding import LOCAL_AXIS
from autopar.problem.options import table_of
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import Prices
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.problem.step_shares import MicroPrices, StepPrices
from autopar.request import Request
from tests.helpers.planned import BATCH, graph

ROWS: tuple[LayoutPair, ...] = tuple(
    LayoutPair(rest, rest) for rest in (("R", "R"), ("S0", "R"), ("R", "S1"), ("S0", "S1"))
)
COLUMNS: tuple[LayoutPair, ...] = (
    *ROWS,
    LayoutPair(("R", "R"), ("P", "P")),
    LayoutPair(("R", "S1"), ("P", "S1")),
    LayoutPair(("S0", "R"), ("S0", "P")),
    LayoutPair(("R", "R"), ("-", "-")),
)


@pytest.mark.parametrize("weight", [False, True])
def test_reshards_per_microbatch_and_per_step(weight: bool) -> None:
    cluster = Cluster.parse("h100:2x4")
    whole, micro, once = (
        made(cluster.mesh((2, 4)), cluster.device, Settings()) for made in (Prices, MicroPrices, StepPrices)
    )
    size, again = 1e8, [i % 2 == 0 for i in range(len(COLUMNS))]
    per_step = once.table_s(ROWS, COLUMNS, size, again, weight=weight)
    per_micro = micro.table_s(ROWS, COLUMNS, size, again, weight=weight)
    if not weight:
        assert not per_step.any()
        assert np.array_equal(per_micro, whole.table_s(ROWS, COLUMNS, size, again))
        return
    for (i, row), (j, column) in itertools.product(enumerate(ROWS), enumerate(COLUMNS)):
        late = [
            rest == "R" and value == "R" and grad == "P"
            for rest, value, grad in zip(row.value, column.value, column.grad, strict=True)
        ]
        kept = tuple("P" if wait else own for wait, own in zip(late, row.grad, strict=True))
        assert (per_step[i, j] > 0) == any(late)
        alone = whole.table_s([LayoutPair(row.value, kept)], [column], size, [again[j]])
        assert per_micro[i, j] == pytest.approx(alone[0, 0])
        if all(late):  # nothing but the sum itself goes back, and it is the same sum
            assert per_micro[i, j] + per_step[i, j] == pytest.approx(whole.table_s([row], [column], size)[0, 0])


def test_copies_around_leaves_count_as_far_as_they_slow_down_collectives() -> None:
    """A leaf that is gathered along dim 1, and its gradient that is scattered: both ends are put in order by copies.
    Those around the sum are part of the work that it runs beside. The leaf takes a share of the compute units from the
    forward beside it."""
    cluster, size = Cluster.parse("h100:2x4"), 1e8
    once = StepPrices(cluster.mesh((2, 4)), replace(cluster.device, contention=0.25), Settings())
    whole, part, rest = ("R", "R"), ("R", "P"), ("R", "S1")
    leaf = once.routes.loads(rest, whole, size, once.bucket_bytes)
    summed = once.routes.loads(part, rest, size, once.grad_bucket_bytes(size, size))
    assert all(sum(load.axis == LOCAL_AXIS for load in loads) == 1 for loads in (leaf, summed))
    priced = once.table_s([LayoutPair(whole, rest)], [LayoutPair(whole, part)], size, weight=True)
    assert priced.item() == pytest.approx(
        0.25 * sum(load.seconds * (0.25 if load.axis == LOCAL_AXIS else 1.0) for load in leaf)
        + sum(load.seconds for load in summed if load.axis != LOCAL_AXIS)
    )


def test_gradients_add_up_where_there_are_several_microbatches() -> None:
    """Each one's but the first's: cast where they add up in another dtype, two read and one written; of ZeRO-2 only
    what rests."""
    cluster, planner = (
        Cluster.parse("h100:1x4"),
        Planner.of(graph(), {"b": BATCH}, Request(Cluster.parse("h100:1x4"), Settings())),
    )
    op = next(
        op for op in planner.program.ops.values() if op.role == "param" and math.prod(op.call.outs[0].sizes) % 4 == 0
    )
    elements, mesh, device = math.prod(op.call.outs[0].sizes), cluster.mesh((4,)), cluster.device
    for option in planner.table(4, placed=False)[op.name]:
        (rest,), (leaf,) = Resting.of([option]).rest, Resting.of([option]).leaf
        cut = 4 if "S" in (rest if option.run == EACH else leaf) else 1
        for settings, nbytes in ((Settings(), 12), (Settings(precision="bf16"), 12)):
            alone, of_four = (MicroPrices(mesh, device, settings, None, m).update_s(op, [option]) for m in (1, 4))
            assert alone == 0.0
            seconds = device.launch_s + device.memory_s(nbytes * elements / cut)
            assert of_four == pytest.approx(0.75 * op.count * seconds)


class Empty(nn.Module):
    """A layer, and a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(8, 8), nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + self.rows.sum(0)).square().sum()


def test_a_weight_without_elements_takes_nothing() -> None:
    """Whole or cut, along the dim of its rows, of which there are none, or the other one."""
    cluster = Cluster.parse("h100:1x4")
    program = read(capture(Empty(), (torch.zeros(8, 8),)).gm, {"b": 8}, training=True)
    once = StepPrices(cluster.mesh((4,)), cluster.device, Settings())
    (rows,) = [op for op in program.ops.values() if op.fqn == "rows"]
    options = table_of(program, 4, (), None)[rows.name]
    assert any(Resting.of([option]).gathered for option in options)
    assert [once.rest_bytes(rows, [option]) for option in options] == [0.0] * len(options)
