"""What is written into the values of `state_dict()` reaches the model, or is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from tests.dist.test_refused import said
from tests.helpers.ranks import on_ranks

WIDTH = 8


class Gated(nn.Module):
    """One whose first weight is cut in two sections where columns are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return F.mse_loss(self.down(F.silu(gate) * value), y)


def _written(recipe: str, folder: str) -> tuple[str, list[str]]:
    """One rank: how the first weight rests, and what is said where values of the state dict were written into, in
    whatever reads the weights next, again, and behind what loads them."""
    torch.manual_seed(0)
    batch = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    model = Gated()
    before = model.up.weight.detach().clone()
    made = autopar.compile(model, "cpu:1x2", batch, recipe=recipe, time_limit_s=5.0)
    step, messages, halved = partial(made.train_step, *made.shard_batch(*batch)), list[str](), 0
    step()
    dcp.save({"model": made.state_dict()}, checkpoint_id=folder)
    for look in (step, made.state_dict, made.full_state_dict, partial(copy.deepcopy, made.module)):
        for value in made.state_dict().values():
            value.mul_(0.5)
        messages += [said(look), said(look)]
        halved += not messages[-2]
    state = {"model": made.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    messages.append(said(step))
    assert torch.equal(made.full_state_dict()["up.weight"], before * 0.5 ** (halved if messages[-1] else 0))
    for load in (made.load_state_dict, lambda written: made.load_full(model.state_dict())):
        written = made.state_dict()
        for value in written.values():
            value.zero_()
        load(written)
        messages.append(said(step))
    assert torch.equal(made.full_state_dict()["up.weight"], before)
    return made.module.declared()["up.weight"].layout, messages


@pytest.mark.parametrize(("recipe", "layout"), [("megatron", "S0/2"), ("zero3", "S0")])
def test_values_of_a_state_dict_are_written_into(recipe: str, layout: str, tmp_path: Path) -> None:
    """Averages of weights that go over `state_dict().values()`, and checkpoints that are loaded into them, left weights
    that rest in sections as they were, in silence."""
    wanted = [layout == "S0/2", False] * 4 + [layout == "S0/2", False, False]
    for rests, messages in on_ranks(2, _written, recipe, str(tmp_path)):
        assert rests == layout and [bool(message) for message in messages] == wanted
        assert all("up.weight of state_dict() was written into, one of 2 such" in text for text in messages if text)
