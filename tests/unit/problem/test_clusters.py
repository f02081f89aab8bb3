"""What may share a choice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.problem.clusters import Cluster, Joint, build, join
from autopar.problem.options import sections_of, table_of
from autopar.problem.read_graph import read
from autopar.recipes import roles
from autopar.rules.language import Use


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


class Apart(Pairs):
    """How far each sample is from the nearest one."""

    def forward(self, x: Tensor) -> Tensor:
        far = self.map(x).tanh().mean(-1)
        return ((far[:, None] - far).square() + torch.eye(len(x), device=x.device)).amin(1).sum()


def test_what_is_put_together_with_itself_has_a_choice_of_its_own() -> None:
    captured = capture(Apart(), (torch.zeros(8, 4),))
    program = read(captured.gm, captured.hints, training=True)
    table = table_of(program, 2, sections_of(program), None)
    home = {op.node.target: cluster for cluster in build(program, table) for op in cluster.members}
    distances = home[torch.ops.aten.sub.Tensor]
    assert "S0" in {use.value for joint in join(distances, table, roles.data(2)) for use in _made(joint, distances)}


def _made(joint: Joint, cluster: Cluster) -> list[Use]:
    """What the difference in a cluster gives under a joint option."""
    return [
        use
        for op, option in zip(cluster.members, joint.options, strict=True)
        if op.target is torch.ops.aten.sub.Tensor
        for use in option.outs
    ]
