"""`torch.combinations` of what has a size that the model fixes: its rows are picked by their places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.recipes import roles
from tests.helpers.verify import Subject, by_recipe, by_stages, right

FIELDS, WIDTH = 6, 8


class Crossed(nn.Module):
    """Products of fields, as factorisation machines have them."""

    def __init__(self, r: int, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.r, self.again, self.up = r, again, nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(FIELDS))

    def forward(self, x: Tensor) -> Tensor:
        fields, h = torch.arange(x.shape[1], device=x.device), self.up(x)
        places = torch.combinations(fields, self.r, with_replacement=self.again)
        weights = torch.combinations(self.weights, r=self.r, with_replacement=self.again).prod(-1)
        return (h[:, places].prod(2) * weights[:, None]).square().mean()


class Rows(Subject):
    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, FIELDS, WIDTH, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(("r", "again"), [(2, False), (3, True), (1, False)])
def test_equals_one_device(r: int, again: bool) -> None:
    model = Crossed(r, again=again)
    captured = capture(model, (torch.zeros(8, FIELDS, WIDTH),))
    who = Rows(f"crossed {r} {again}", "train", captured, model.state_dict())
    right(who.verified(by_recipe(who, (2,), "zero3")))
    right(who.verified(by_stages(who, (1,), (roles.data,), 2, 4, "1f1b")))
