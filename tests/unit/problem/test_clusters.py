"""What may share a choice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.problem.clusters import build, join
from autopar.problem.options import sections_of, table_of
from autopar.problem.read_graph import read
from autopar.recipes import roles


class Pairs(nn.Module):
    """How alike all samples of a batch are, of which each is to be most like the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.map(x), dim=-1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x), device=x.device).roll(1))


def test_what_a_product_takes_twice_has_a_choice_of_its_own() -> None:
    """In one cluster it would be whole on all ranks, and so would be all pairs."""
    captured = capture(Pairs(), (torch.zeros(8, 4),))
    program = read(captured.gm, captured.hints, training=True)
    table = table_of(program, 2, sections_of(program), None)
    (product,) = [c for c in build(program, table) if len(set(c.root.operands)) < len(c.root.operands)]
    assert len(product.members) == 1
    found = {joint.options[0].factor for joint in join(product, table, roles.data(2))}
    assert found == {"_0", "o"}, "pairs are cut by their first sample or by the second"
