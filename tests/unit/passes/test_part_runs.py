"""Runs of alike blocks in parts: the same values, weights by instance, and what cannot be parted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import PlanError
from passes.fold_repeats import body_of, is_folded, targets
from passes.interpret import Interpret
from passes.part_runs import part_runs, parts_at

DEPTH = 5
RUN = "layers_0"


class Block(nn.Module):
    """A map and a batch norm, which has buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return h + self.norm(self.map(h)) * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(x)
        for layer in self.layers:
            x = layer(x, scale)
        return (x * x).mean()


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    model = Stack()
    return model, capture(model, (torch.randn(8, 4),))


def calls(gm):
    return [node for node in gm.graph.nodes if is_folded(node)]


@pytest.mark.parametrize("begins", [[1], [4], [2, 3], [1, 2, 3, 4]])
def test_parts_compute_what_the_run_computes(captured, begins):
    model, whole = captured
    parts = parts_at(whole.gm, {RUN: begins})
    names, parted = parts[RUN], part_runs(whole.gm, parts)
    assert names == {f"layers_{begin}": begin for begin in begins}
    edges = [0, *begins, DEPTH]
    assert [(str(call.target), call.meta["repeat"]) for call in calls(parted)] == [
        (name, stop - first) for name, first, stop in zip([RUN, *names], edges, edges[1:], strict=False)
    ]
    weights = dict(model.state_dict())
    batch = {whole.input_names[0]: torch.randn(8, 4)}
    for each in (whole.gm, parted):
        batch[each] = Interpret(each, weights).run_named({whole.input_names[0]: batch[whole.input_names[0]]})
    assert all(torch.equal(a, b) for a, b in zip(batch[whole.gm], batch[parted], strict=True))


def test_each_part_has_the_weights_and_buffers_of_its_instances(captured):
    parted = part_runs(captured[1].gm, {RUN: {"tail": 2}})
    head, tail = (body_of(call) for call in calls(parted))
    held = [
        [node.meta["fqns"] for node in body.graph.nodes if node.meta.get("fqn") == "map.weight"]
        for body in (head, tail)
    ]
    assert held == [[["layers.0.map.weight", "layers.1.map.weight"]], [[f"layers.{i}.map.weight" for i in (2, 3, 4)]]]
    assert all(
        name.startswith(("layers.2.", "layers.3.", "layers.4.")) for names in targets(tail) for name in names
    ) and targets(tail)
    (call,) = calls(captured[1].gm)
    assert call.meta["repeat"] == DEPTH, "the graph that was parted stays as it is"


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({"layers": {"x": 1}}, "there is no run 'layers' to be parted; the graph has layers_0"),
        ({RUN: {"x": 0}}, r"has 5 instances and cannot be parted in front of \[0\]"),
        ({RUN: {"x": 3, "y": 3}}, r"cannot be parted in front of \[3, 3\]"),
        ({RUN: {"x": 5}}, r"cannot be parted in front of \[5\]"),
        ({RUN: {RUN: 2}}, "cannot be called 'layers_0'"),
    ],
)
def test_what_cannot_be_parted_is_refused(captured, parts, wanted):
    with pytest.raises(ValueError, match=wanted):
        part_runs(captured[1].gm, parts)
    with pytest.raises(PlanError, match=wanted):
        captured[1].parted(parts)


def test_a_capture_is_parted_once(captured):
    whole = captured[1]
    once = whole.parted({RUN: {"tail": 2}})
    assert once.parted({RUN: {"tail": 2}}) is once and whole.parted({}) is whole and once.graph_hash == whole.graph_hash
    with pytest.raises(PlanError, match="parted for another plan"):
        once.parted({RUN: {"tail": 3}})


class Alike(nn.Module):
    """Blocks of `a.b`, and as many of `a_b`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b = nn.Module(), nn.ModuleList(Block() for _ in range(DEPTH))
        self.a.b = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.a.b:
            x = layer(x, torch.ones_like(x))
        x = x.relu()
        for layer in self.a_b:
            x = layer(x, torch.ones_like(x))
        return (x * x).mean()


def test_parts_of_runs_whose_modules_are_called_alike_have_names_of_their_own():
    gm = capture(Alike(), (torch.randn(8, 4),)).gm
    first, second = (str(call.target) for call in calls(gm))
    parts = parts_at(gm, {first: [2, 3], second: [2, 3]})
    assert parts == {first: {"a_b_3": 2, "a_b_4": 3}, second: {"a_b_3_1": 2, "a_b_4_1": 3}}
    assert [call.meta["repeat"] for call in calls(part_runs(gm, parts))] == [2, 1, 1] * 2
