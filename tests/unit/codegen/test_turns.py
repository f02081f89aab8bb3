"""Turns of weights as `gather` gets them do what the operators of the graph do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.codegen.turns import turn_text, turned
from autopar.problem.read_graph import read
from autopar.runtime.turns import Turn

TURNS = {
    "transpose": (lambda w: w.transpose(-1, 0), "dims=(2, 1, 0)"),
    "permute": (lambda w: w.permute(2, 0, 1), "dims=(2, 0, 1)"),
    "both": (lambda w: w.permute(1, 2, 0).transpose(0, 1), "dims=(2, 1, 0)"),
    "there and back": (lambda w: w.transpose(0, 1).transpose(0, 1), ""),
    "cast": (lambda w: w.to(torch.bfloat16).float(), "casts=(torch.bfloat16, torch.float32)"),
    "turned and cast": (lambda w: w.transpose(1, 2).double(), "dims=(0, 2, 1), casts=(torch.float64,)"),
}


class Read(nn.Module):
    """A model that reads a weight as `turn` makes it."""

    def __init__(self, turn: object) -> None:
        super().__init__()
        self.turn, self.w = turn, nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.turn(self.w) * x).sum()  # type: ignore[operator]


@pytest.mark.parametrize("name", TURNS)
def test_they_are_those_of_the_graph(name: str) -> None:
    turn, text = TURNS[name]
    model = Read(turn)
    wanted = turn(model.w)
    captured = capture(model, (torch.ones(1, dtype=wanted.dtype),), mode="train")
    program = read(captured.gm, captured.hints, training=True)
    (reader,) = [
        (op, i)
        for ref, readers in program.readers.items()
        for op, i in readers
        if op.name not in program.following and program.is_weight(ref)
    ]
    ops = program.turn(reader[0].operands[reader[1]])
    assert turn_text(ops).removeprefix(", ") == text
    made = Turn(*turned(ops))
    assert torch.equal(made.of(model.w), wanted)
    assert made.of(model.w).dtype == wanted.dtype
    grad = torch.randn(wanted.shape).to(wanted.dtype)
    assert torch.equal(made.back(grad, torch.float32), torch.autograd.grad(wanted, model.w, grad)[0])
