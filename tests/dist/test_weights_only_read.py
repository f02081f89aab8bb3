"""Weights that a stage reads for a value without a gradient only (their norm among the outputs, a teacher's moving
average, a power iteration): it gathers their leaves and sends no gradients back, and nothing is priced for these."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.codegen.edges import edges
from autopar.joint.choice import staged
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import Space
from autopar.joint.timetables import Kind
from autopar.memory.predict import memory_of
from autopar.pipeline import views
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.simulate import simulate
from tests.helpers.verify import Subject, by_recipe, by_stages, right


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.up(h).relu())


class Model(nn.Module):
    """A stem, alike blocks and a head. `how`: "norm" gives the norm of both weights besides, and "detached" the same
    without gradients; "teacher" goes towards them at each step, and says what it makes of the last layer."""

    def __init__(self, how: str, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.stem, self.head = how, nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        if how == "teacher":
            self.register_buffer("first", self.stem.weight.detach().clone())
            self.register_buffer("last", self.head.weight.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        loss = (self.head(h) - y).square().mean()
        weights = self.stem.weight, self.head.weight
        if self.how == "norm":
            return loss, torch.stack([weight.square().sum() for weight in weights]).sum().sqrt()
        if self.how == "detached":
            return loss, torch.stack([weight.detach().square().sum() for weight in weights]).sum().sqrt()
        if self.how == "teacher":
            with torch.no_grad():
                self.first.mul_(0.9).add_(weights[0], alpha=0.1)
                self.last.mul_(0.9).add_(weights[1], alpha=0.1)
            return loss, (h.detach() @ self.first.clone() @ self.last.clone()).square().mean()
        return loss


class Rows(Subject):
    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randn(8, 16, generator=draw) for name in self.captured.input_names}


@cache
def _rows(how: str) -> Rows:
    model = Model(how)
    return Rows(how, "train", capture(model, (torch.zeros(8, 16), torch.zeros(8, 16))), model.state_dict())


@pytest.mark.parametrize(
    ("how", "schedule", "virtual", "role"),
    [
        ("norm", "1f1b", 1, roles.zero1),
        ("detached", "gpipe", 1, roles.zero2),
        ("teacher", "1f1b", 1, roles.zero1),
        ("norm", "zbv_zero_bubble", 2, roles.zero1),  # the first stage and the last one are on one place
        *(
            pytest.param(how, schedule, virtual, role, marks=pytest.mark.slow)
            for how in ("norm", "detached", "teacher")
            for schedule, virtual in (
                ("gpipe", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv_zero_bubble", 2)
            )
            for role in (roles.data, roles.zero1, roles.zero2, roles.zero3)
        ),
    ],
)  # fmt: skip
def test_equals_one_device(how: str, schedule: str, virtual: int, role: roles.Role) -> None:
    right(_rows(how).verified(by_stages(_rows(how), (2,), (role,), 2, 4, schedule, virtual)))


@pytest.mark.parametrize("how", ["norm", "detached"])
def test_a_stage_that_only_reads_a_weight_has_no_gradient_of_it(how: str) -> None:
    who = _rows(how)
    made = by_stages(who, (2,), (roles.zero1,), 2, 4, "1f1b")
    first, last = views(read(who.captured.gm, made.hints, training=True), made)
    assert "p_stem_weight" in last.held and "p_stem_weight" not in last.reached
    assert {"p_stem_weight", "p_stem_bias"} == set(first.reached) and {"p_head_weight", "p_head_bias"} == set(
        last.reached
    )
    whole = [
        {entry.node for entry in place.entries if entry.kind == "whole gradients"}
        for place in memory_of(who.captured.gm, made).places
    ]
    assert "stem.weight" in whole[0] and "stem.weight" not in whole[1] and "head.weight" in whole[1]


def test_what_reads_a_weight_without_a_gradient_leaves_its_sum_in_a_bucket() -> None:
    """Of replicas, too; the sum was taken at the use, after every microbatch, because not all readers left a part."""
    who = _rows("detached")
    for made in (by_recipe(who, (2,), "ddp"), by_stages(who, (2,), (roles.data,), 2, 4, "1f1b")):
        found = edges(read(who.captured.gm, made.hints, training=True), made).reshards
        assert {reshard.role for reshard in found if reshard.ref[0] in ("p_stem_weight", "p_head_weight")} == {"sync"}
    assert by_recipe(who, (2,), "ddp").predicted.step_s < 1.2 * by_recipe(_rows(""), (2,), "ddp").predicted.step_s
    right(who.verified(by_recipe(who, (2,), "ddp")))


@cache
def _wide(how: str) -> Captured:
    with torch.device("meta"):
        model, rows = Model(how, 2048), torch.zeros(8, 2048)
    return capture(model, (rows, rows))


@pytest.mark.parametrize("how", ["norm", "teacher"])
def test_the_price_is_what_the_simulation_takes(how: str) -> None:
    request = Request(Cluster.parse("h100:1x8"), Settings(precision="bf16"), recipe="1f1b", mesh=(4,))
    context = SearchContext(_wide(how).gm, {"b": 16384}, request)
    space = Space("stages", lambda mesh: (roles.zero1,) if mesh == (4,) else None, (Kind("1f1b"),), 1)
    made = staged(context, [space], None, {"model": how, "graph_hash": "0" * 64})
    assert simulate(_wide(how).gm, made).step_s == pytest.approx(made.predicted.step_s, rel=2e-3)
