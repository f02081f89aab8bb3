"""An optimizer of the parameters of the model that was compiled is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RunError
from tests.helpers.ranks import on_ranks


def _old() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.randn(8, 4))
    old = torch.optim.AdamW(model.parameters(), 1e-2)
    old.step()
    compiled = autopar.compile(model, "cpu:1x2", batch, loss_fn=nn.functional.mse_loss, recipe="ddp", time_limit_s=5.0)
    new = torch.optim.AdamW(compiled.parameters(), 1e-2)
    compiled.train_step(*compiled.shard_batch(*batch))
    with pytest.raises(RunError, match="this AdamW was made of the parameters of the model that was compiled"):
        old.step()
    new.step()
    new.zero_grad()
    new.step()
    model(batch[0]).sum().backward()  # it trains as well
    old.step()


def test_an_optimizer_that_was_made_before_compile_is_refused() -> None:
    """Its steps changed nothing, in silence."""
    on_ranks(2, _old)
