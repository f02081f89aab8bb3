"""Which piece of a model operators belong to that are no pieces themselves."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.pipeline.units import homes, units
from autopar.problem.read_graph import read


class _Told(nn.Module):
    """A loss, and what comes from a layer in front of the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        told = self.inner(x)
        return self.head(told.relu()).square().mean(), told


def test_a_result_belongs_to_the_piece_that_makes_it() -> None:
    """The stage that makes it returns it, in the layout in which it is told: that is its time, not the last one's."""
    captured = capture(_Told(), (torch.zeros(4, 8),), {}, mode="train")
    program = read(captured.gm, captured.hints, training=True)
    pieces = units(program)
    home = homes(program, pieces)
    (told,) = (op for op in program.results if op.role == "output")
    assert home[told.name] == told.operands[0][0] != pieces[-1].name
    (loss,) = (op for op in program.results if op.role == "loss")
    assert home[loss.name] == pieces[-1].name
