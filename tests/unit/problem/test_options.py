"""What operators, weights and ports can do on one mesh axis."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.problem.options import sections_of, table_of
from autopar.problem.read_graph import read


class Gated(nn.Module):
    """A fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * value)


class Again(nn.Module):
    """One block, called several times (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
        return x.square().sum()


def test_weights_that_blocks_share_reach_them_cut_in_sections() -> None:
    captured = capture(Again(), (torch.zeros(6, 4),))
    program = read(captured.gm, captured.hints, training=True)
    table = table_of(program, 2, sections_of(program), None)
    (up,) = [op.name for op in program.ops.values() if op.role == "port" and op.call.outs[0].sizes == (16, 4)]
    for name in (up, "p_block_up_weight"):
        assert "S0/2" in [option.outs[0].value for option in table[name]]


def test_no_dim_of_symbolic_size_is_cut_in_sections_on_its_way_to_a_block() -> None:
    """Of as many samples as the projection has rows they were, in the layout of its rows: those of another batch have
    no such sections."""
    captured = capture(Again(), (torch.zeros(16, 4),))
    program = read(captured.gm, captured.hints, training=True)
    assert program.ops
    table = table_of(program, 2, sections_of(program), None)
    ports = [op.name for op in program.ops.values() if op.role == "port" and op.call.outs[0].sizes == (16, 4)]
    cut = {name: [option.outs[0].value for option in table[name]] for name in ports}
    assert any("S0/2" in values for values in cut.values()) and not all("S0/2" in values for values in cut.values())
