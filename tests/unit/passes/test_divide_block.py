"""A block in two halves: the same values, weights where they are read, and what cannot be divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import PlanError
from passes.divide_block import Point, points
from passes.fold_repeats import body_of, is_folded
from passes.interpret import Interpret
from passes.part_runs import divided_at, part_runs

RUN = "layers_0"


class Block(nn.Module):
    """Two branches on a residual stream; the second one reads what is the same for all blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 4)

    def forward(self, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = h + self.down(self.up(h).relu())
        return h + self.out(h) * scale


class Normed(Block):
    """The same with a batch norm, which has buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(h, scale))


class Tied(Block):
    """The same with a weight that both branches read."""

    def forward(self, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = h + self.out(h).relu()
        return h + self.out(h) * scale


class Stack(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(x)
        for layer in self.layers:
            x = layer(x, scale)
        return (x * x).mean()


def captured(kind: type[Block] = Block):
    torch.manual_seed(0)
    model = Stack(kind)
    return model, capture(model, (torch.randn(8, 4),))


def opened(gm):
    return {str(node.target): body_of(node) for node in gm.graph.nodes if is_folded(node)}


def test_halves_compute_what_the_block_computes_wherever_it_is_divided():
    model, whole = captured()
    weights, x = dict(model.state_dict()), {whole.input_names[0]: torch.randn(8, 4)}
    wanted = Interpret(whole.gm, weights).run_named(x)
    each = points(opened(whole.gm)[RUN])
    assert "add" in each, each
    for behind in each:
        for first in range(3):
            halves = part_runs(whole.gm, divided_at(whole.gm, {RUN: {first: behind}}))
            assert all(map(torch.equal, Interpret(halves, weights).run_named(x), wanted)), (behind, first)


def test_each_half_has_the_weights_that_it_reads():
    _, whole = captured()
    parts = divided_at(whole.gm, {RUN: {1: "add"}})
    assert parts == {RUN: {"layers_1": 1, "layers_1_rest": "add", "layers_2": 2}}
    bodies = opened(part_runs(whole.gm, parts))
    held = {
        name: [node.meta["fqns"] for node in body.graph.nodes if "fqns" in node.meta] for name, body in bodies.items()
    }
    assert held["layers_1"] == [["layers.1.up.weight"], ["layers.1.up.bias"], ["layers.1.down.weight"]]
    assert held["layers_1_rest"] == [["layers.1.out.weight"], ["layers.1.out.bias"]]
    assert {name: len(names[0]) for name, names in held.items()} == {
        RUN: 1,
        "layers_1": 1,
        "layers_1_rest": 1,
        "layers_2": 1,
    }


def test_what_the_rest_reads_beside_the_value_between_is_told():
    _, whole = captured()
    each = points(opened(whole.gm)[RUN])
    assert each["add"].passed == () and each["relu"] == Point(each["relu"].front, ("x",))
    assert not any(name.startswith("mul") for name in each), "its other operand is made of what is in front"


@pytest.mark.parametrize("kind", [Normed, Tied])
def test_blocks_that_cannot_be_divided(kind):
    _, whole = captured(kind)
    body = opened(whole.gm)[RUN]
    added = [node.name for node in body.graph.nodes if node.name.startswith("add")]
    assert added and not {*added} & {*points(body)}


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({"tail": "add"}, r"layers_0 \(3 x\) cannot be divided behind add: wanted one block"),
        ({"one": 2, "tail": "mul"}, r"one \(1 x\) cannot be divided behind mul: wanted one block, and one of "),
        ({"one": 2, "one_rest": "add", "tail": "add"}, "one_rest .* cannot be divided"),
        ({"one": 2, RUN: "add"}, "cannot be called 'layers_0'"),
    ],
)
def test_what_cannot_be_divided_is_refused(parts, wanted):
    with pytest.raises(PlanError, match=wanted):
        captured()[1].parted({RUN: parts})
