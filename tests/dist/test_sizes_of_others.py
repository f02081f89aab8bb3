"""What an operator reads for its sizes alone: nothing is gathered for it, and no gradient comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from tests.helpers.verify import Subject, by_chance


class Directions(nn.Module):
    """Rows of length one, as in attention by cosines: the norm is spread over the sizes of what it divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(self.first(x), dim=-1) + x
        return (self.scale.expand_as(h) * F.normalize(self.second(h), dim=1)).square().sum() / len(x)


class Rows(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("seed", range(4))
def test_equals_one_device(seed: int) -> None:
    model = Directions()
    who = Rows("directions", "train", capture(model, (torch.zeros(8, 16, 8),)), model.state_dict())
    assert not [node for node in who.captured.gm.graph.nodes if node.target is torch.ops.aten.expand_as.default]
    report = who.verified(by_chance(who, (2, 2), seed))
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])
