"""Optimizer state that lacks parameters, or comes from one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar._torch import local_of
from autopar.errors import RunError
from tests.dist.test_checkpoints import BATCH, Scaled, Unused
from tests.helpers.ranks import on_ranks


def _lacking() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    compiled = autopar.compile(Unused(), "cpu:1x2", (x,), recipe="zero3", time_limit_s=5.0)
    made = [torch.optim.AdamW(compiled.parameters(), 1e-2) for _ in range(2)]
    compiled.train_step(*compiled.shard_batch(x))
    made[0].step()
    saved = compiled.optimizer_state_dict(made[0])
    lacking = {**saved, "state": {name: value for name, value in saved["state"].items() if "up" not in name}}
    for state, said in (
        (lacking, "2 of the 6 .*: up.weight, up.bias. Load"),
        ({**saved, "state": {}}, r"6 of the 6 .*: up.weight, up.bias, pooler.weight, pooler.bias, down.weight ..."),
    ):
        with pytest.raises(RunError, match=f"the saved state has nothing of {said}"):
            compiled.load_optimizer_state_dict(made[1], state)
        assert not made[1].state
    compiled.load_optimizer_state_dict(made[1], lacking, strict=False)
    names = {parameter: name for name, parameter in compiled.named_parameters()}
    assert {names[parameter]: float(value["step"]) for parameter, value in made[1].state.items()} == {
        "pooler.weight": 0,
        "pooler.bias": 0,
        "down.weight": 1,
        "down.bias": 1,
    }
    heavy, light = (torch.optim.SGD(compiled.parameters(), 1e-2, momentum=momentum) for momentum in (0.9, 0.0))
    compiled.load_optimizer_state_dict(heavy, compiled.optimizer_state_dict(light))  # options are those that were saved
    assert not any(heavy.state.values()) and heavy.param_groups[0]["momentum"] == 0


def test_a_state_that_lacks_parameters_is_refused() -> None:
    """These began anew: in silence where nothing was saved, else unless torch's own error told of an option that there
    was not."""
    on_ranks(2, _lacking)


def _from_one_device(recipe: str, size: int) -> dict[str, Tensor]:
    """One rank: parameters after a step behind one that a device alone has taken and saved."""
    torch.manual_seed(0)
    plain, x = Scaled(), torch.randn(BATCH, 4)
    there = torch.optim.AdamW(plain.parameters(), 1e-2)
    plain(x).backward()
    there.step()
    compiled = autopar.compile(plain, f"cpu:1x{size}", (x,), recipe=recipe, time_limit_s=5.0)
    here = torch.optim.AdamW(compiled.parameters(), 1e-2)
    saved = get_optimizer_state_dict(plain, there)
    for value in saved["state"].values():
        for one in value.values():
            # rows are not alike
            one.mul_(1 if one.dim() < 1 else 1 + torch.arange(len(one)).view(-1, *(1,) * (one.dim() - 1)))
    compiled.load_optimizer_state_dict(here, saved, strict=False)
    assert not {
        one.untyped_storage().data_ptr() for value in saved["state"].values() for one in value.values() if one.dim()
    } & {local_of(one).untyped_storage().data_ptr() for value in here.state.values() for one in value.values()}
    set_optimizer_state_dict(plain, there, copy.deepcopy(saved), options=StateDictOptions(strict=False))
    for made in (compiled.train_step(*compiled.shard_batch(x)), plain(x)):
        if made.requires_grad:
            there.zero_grad()
            made.backward()
    here.step()
    there.step()
    return {name: value - plain.state_dict()[name] for name, value in compiled.full_state_dict().items()}


@pytest.mark.parametrize(("recipe", "size"), [("zero3", 2), ("zero1", 3)])
def test_what_one_device_saved_of_its_optimizer_is_loaded(recipe: str, size: int) -> None:
    """Whole tensors: they were left as they were, and no step can work with them beside DTensors."""
    for off in on_ranks(size, _from_one_device, recipe, size):
        assert max(float(each.abs().max()) for each in off.values()) < 1e-6
