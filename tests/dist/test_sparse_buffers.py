"""Buffers that are sparse where the model is made (Whisper's heads of alignment): ranks hold them dense, whether the
graph reads them or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, planned


class Sparse(nn.Module):
    """One buffer of the state dict, and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.register_buffer("heads", torch.eye(8).to_sparse(), persistent=False)
        self.register_buffer("rows", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        """[b, 8] -> []."""
        return self.map(x).tanh().square().mean()


@pytest.mark.parametrize("how", ["zero3", "random 0"])
def test_ranks_hold_them_dense(how: str) -> None:
    torch.manual_seed(0)
    model = Sparse()
    captured = capture(model, (torch.randn(8, 8),))
    assert torch.equal(captured.constants["heads"].to_dense(), torch.eye(8))
    who = Subject("sparse", "train", captured, model.state_dict())
    made = planned(who, (2,), how)
    report = verify(
        case_of(captured, made, who.weights, {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}),
        ranks=living(2),
    )
    assert report.ok, (report.first, report.worst)
