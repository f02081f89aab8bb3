"""Weights without elements, as configs leave behind (a table as wide as the rest of a dim of which nothing is left):
planned, emitted and run."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned


class Nowhere(nn.Module):
    """A map to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(0))


class Emptied(nn.Module):
    """Maps that are put together of two, of which one has no columns."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rest = nn.ModuleList(Nowhere() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, none in zip(self.maps, self.rest, strict=True):
            x = x + F.linear(x, torch.cat([one.weight, none.weight]), torch.cat([one.bias, none.bias])).tanh()
        return x.square().mean()


@cache
def subject() -> Subject:
    torch.manual_seed(0)
    model = Emptied()
    return Subject("emptied", "train", capture(model, (torch.randn(8, 8),)), model.state_dict())


@pytest.mark.parametrize("how", ["tp", "zero3", "random 0", "1f1b"])
def test_equals_one_device(how: str) -> None:
    who = subject()
    made = by_stages(who, (1,), "single", 2, 2, how) if how == "1f1b" else planned(who, (2,), how)
    report = verify(
        case_of(who.captured, made, who.weights, {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}),
        ranks=living(2),
    )
    assert report.ok, (report.first, report.worst)
