"""Buffers that a step changes are the same tensors behind it, under each of their names, as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from tests.helpers.ranks import on_ranks

WIDTH = 8


class _Shared(nn.Module):
    """A batch norm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = self.norm

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.again(self.up(x))), y)


def _kept(recipe: str) -> None:
    torch.manual_seed(0)
    model, batch = _Shared().double(), (torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double())
    alone = copy.deepcopy(model)
    made = autopar.compile(model, "cpu:1x2", batch, recipe=recipe, time_limit_s=5.0)
    held = dict(made.named_buffers())
    for _ in range(2):
        made.train_step(*made.shard_batch(*batch))
        alone(*batch)
    state = made.state_dict()
    for name, wanted in alone.named_buffers(remove_duplicate=False):
        assert torch.allclose(state[name], wanted, rtol=1e-12), name
    assert all(held[name] is buffer for name, buffer in made.named_buffers())


@pytest.mark.parametrize("recipe", ["ddp", "tp", "zero3"])
def test_buffers_that_change_stay_the_same_tensors(recipe: str) -> None:
    """A second name, and whoever had kept a buffer (averages of weights), had the values from before the first step."""
    on_ranks(2, _kept, recipe)
