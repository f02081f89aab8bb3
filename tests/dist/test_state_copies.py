"""What is written into the values of `state_dict()` reaches the model, or is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
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


def _mixed() -> tuple[str, list[str]]:
    """One rank: what is said where values of parameters are loaded, and mixed with those of the state dict; and the
    state dict itself is loaded, and averaged with another one."""
    torch.manual_seed(0)
    batch = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    made = autopar.compile(Gated(), "cpu:1x2", batch, recipe="megatron", time_limit_s=5.0)
    optimizer = torch.optim.AdamW(made.parameters())
    made.train_step(*made.shard_batch(*batch))
    optimizer.step()
    before = made.full_state_dict()
    own = {name: param.detach().clone() for name, param in made.named_parameters()}
    averages = copy.deepcopy(made.state_dict())
    with pytest.raises(RuntimeError, match="rows in the model's order"):
        averages["up.weight"].lerp_(own["up.weight"], 0.5)
    with pytest.raises(RuntimeError, match="of which each rank has a part"):
        float(averages["up.weight"].norm())
    moments = get_optimizer_state_dict(made.module, optimizer)
    messages = [
        said(lambda: made.load_state_dict(own)),
        said(lambda: made.load_full(own)),
        said(lambda: made.load_optimizer_state_dict(optimizer, moments)),
    ]
    torch._foreach_lerp_([*averages.values()], [*made.state_dict().values()], 0.5)
    made.load_state_dict(averages)
    made.load_optimizer_state_dict(optimizer, made.optimizer_state_dict(optimizer))
    after = made.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    for name, param in made.named_parameters():
        param.data.copy_(own[name])
    after = made.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return made.module.declared()["up.weight"].layout, messages


def test_values_of_parameters_are_not_taken_for_those_of_a_state_dict() -> None:
    """An average of weights that was made of `parameters()` had the rows of weights that rest in sections in their
    order: load_state_dict took them for the model's, in silence, and so did operators with values of state dicts and
    load_optimizer_state_dict of what torch's function gives."""
    for rests, (loaded, whole, moments) in on_ranks(2, _mixed):
        assert rests == "S0/2" and "up.weight: got a DTensor, which load_state_dict() takes" in whole
        for message in (loaded, moments):
            assert "up.weight: the weight rests in another order than the model's" in message


@pytest.mark.parametrize(("recipe", "layout"), [("megatron", "S0/2"), ("zero3", "S0")])
def test_values_of_a_state_dict_are_written_into(recipe: str, layout: str, tmp_path: Path) -> None:
    """Averages of weights that go over `state_dict().values()`, and checkpoints that are loaded into them, left weights
    that rest in sections as they were, in silence."""
    wanted = [layout == "S0/2", False] * 4 + [layout == "S0/2", False, False]
    for rests, messages in on_ranks(2, _written, recipe, str(tmp_path)):
        assert rests == layout and [bool(message) for message in messages] == wanted
        assert all("up.weight of state_dict() was written into, one of 2 such" in text for text in messages if text)
