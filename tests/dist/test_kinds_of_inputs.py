"""An input of another kind of numbers (bool, integer, real) than was planned is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.dist.test_refused import said
from tests.helpers.ranks import on_ranks

WIDTH = 8


class _Images(nn.Module):
    """`float()` of a float is no operator; three times a byte overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = ~mask if mask.dtype == torch.bool else mask < 0
        return self.down(self.up(x.float() * 3)).masked_fill(mask, 0).square().mean()


def _kinds(recipe: str) -> list[str]:
    """What is said of bytes for floats, of integers for a mask, of nothing wrong, and in a pipeline of wider floats."""
    torch.manual_seed(0)
    model = _Images()
    images = torch.randint(0, 255, (8, WIDTH), dtype=torch.uint8)
    mask = torch.ones(8, WIDTH, dtype=torch.bool)
    made = autopar.compile(model, "cpu:1x2", (images.float(), mask), recipe=recipe, time_limit_s=5.0)
    tries = ((images, mask), (images.float(), mask.long()), (images.float(), mask))
    tries += ((images.double(), mask),) * (recipe == "1f1b")
    return [said(lambda batch=batch: made.train_step(*made.shard_batch(*batch))) for batch in tries]


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "1f1b"])
def test_inputs_of_another_kind_than_planned_are_refused(recipe: str) -> None:
    """Programs computed something else than the model, in silence: bytes overflowed, integers were taken for a mask."""
    for of_images, of_mask, right, *wider in on_ranks(2, _kinds, recipe):
        assert "input 'x' is torch.uint8 and was planned as torch.float32: what a model does by the dtype" in of_images
        assert "input 'mask' is torch.int64 and was planned as torch.bool" in of_mask
        assert not right
        assert all("torch.float64 and was planned as torch.float32: what stages of" in text for text in wider)
