"""What waits in the background goes on by bytes, which are others on each rank where shards are uneven: all ranks begin
their collectives in one order."""

from __future__ import annotations

import itertools
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.runtime.gradsync import GradSync
from autopar.verify import case_of
from autopar.verify.step import step
from tests.helpers.ranks import on_ranks
from tests.helpers.verify import Subject, planned

WIDTHS = (8, 5, 7, 6, 11, 3, 9, 5, 13, 7, 6, 5, 8)


class Odd(nn.Module):
    """Layers whose widths most meshes cannot cut evenly; what each gives is used again much later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(WIDTHS))
        self.back = nn.ModuleList(nn.Linear(o, WIDTHS[-1]) for o in WIDTHS[1:])

    def forward(self, x: Tensor) -> Tensor:
        """[b, 8] -> []."""
        total = x
        for layer, back in zip(self.layers, self.back, strict=True):
            x = layer(x).tanh()
            total = total + back(x)
        return total.square().mean()


@cache
def subject() -> Subject:
    torch.manual_seed(0)
    model = Odd()
    return Subject("odd", "train", capture(model, (torch.randn(8, 8),)), model.state_dict())


def _with_limit(limit_bytes, source, rank_case, wanted):
    with mock.patch.object(GradSync.__init__, "__defaults__", (limit_bytes,)):
        gaps, _ = step(source, rank_case, wanted)
    return max(gaps.values())


@pytest.mark.parametrize("limit_bytes", [200, 500])
@pytest.mark.parametrize("how", [f"random {seed}" for seed in range(2)])
def test_ranks_begin_collectives_in_one_order(how: str, limit_bytes: int) -> None:
    who = subject()
    case = case_of(
        who.captured,
        planned(who, (2, 2), how),
        who.weights,
        {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))},
    )
    assert max(on_ranks(4, _with_limit, limit_bytes, case.source(), case.rank_case, case.reference())) < 1e-9
