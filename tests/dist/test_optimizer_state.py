"""Optimizer state that lacks parameters, or comes from one device."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar._torch import local_of
from autopar.errors import RunError
from autopar.frontend import load
from tests.dist.test_checkpoints import BATCH, MODEL, PLANS, Emitted, Scaled, Unused, alone, emitted, optimizer, save
from tests.helpers.ranks import on_ranks
from tests.helpers.verify import spec


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


class Means(torch.optim.Optimizer):
    """Its state is not shaped as parameters: averages of gradients over columns and over rows. `step` takes no
    closure."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 1e-2})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, size = self.state[p], p.grad.abs()
                state["rows"] = state.get("rows", 0) / 2 + (size.mean(1, keepdim=True) if p.dim() > 1 else size)
                state["columns"] = state.get("columns", 0) / 2 + size.mean(0)
                p.add_(p.grad / (state["rows"] + state["columns"] + 1e-3), alpha=-group["lr"])


def _steps(what: Emitted, folder: str, *, save: bool, load: bool) -> dict[str, Tensor]:
    """One rank: parameters after three steps. With `save` there is only the first one, which is left in `folder`; with
    `load` only the others, behind what is there."""
    module = what[1].build(what[0])
    batch, made = module.shard_batch(**what[1].batch), Means(module.parameters())
    if not load:
        module.train_step(*batch)
        made.step()
        module.zero_grad()
    state = {"model": module.state_dict(), "optimizer": module.optimizer_state_dict(made)}
    if save:
        dcp.save(state, checkpoint_id=folder)
        return {}
    if load:
        dcp.load(state, checkpoint_id=folder)
        module.load_state_dict(state["model"])
        module.load_optimizer_state_dict(made, state["optimizer"])
    for _ in range(2):
        module.train_step(*batch)
        made.step()
    return module.full_state_dict()


@pytest.mark.parametrize(("first", "then"), [("tp on 4", "zero3 on 3"), ("zero3 on 3", "tp on 4")])
def test_state_of_other_shapes_goes_on_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    """Rows of a weight that rests in sections were saved in its order and read in the model's, in silence; sums over
    ranks were an error of torch's, and so was a step without a closure."""
    one, other, alone = (emitted(*how) for how in (PLANS[first], PLANS[then], ((1,), "ddp")))
    folder = str(tmp_path / "saved")
    (wanted,) = on_ranks(1, functools.partial(_steps, save=False, load=False), alone, folder)
    on_ranks(one[1].plan.ranks, functools.partial(_steps, save=True, load=False), one, folder)
    for got in on_ranks(other[1].plan.ranks, functools.partial(_steps, save=False, load=True), other, folder):
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def _unsaved(what: Emitted) -> list[str]:
    """One rank: what is said of state that a checkpoint would have wrong."""
    module = what[1].build(what[0])
    made, said = Means(module.parameters()), []
    module.train_step(*module.shard_batch(**what[1].batch))
    made.step()
    for change in (lambda p: torch.zeros_like(local_of(p)), lambda p: p @ p.mT):
        name, param = next((n, p) for n, p in module.named_parameters() if module.declared()[n].sectioned)
        with torch.no_grad():
            made.state[param]["more"] = change(param)
        with pytest.raises(RunError) as error:
            module.optimizer_state_dict(made)
        said.append(str(error.value).replace(name, "NAME"))
    return said


def test_state_that_a_checkpoint_would_have_wrong_is_refused() -> None:
    what = emitted(*PLANS["tp on 4"])
    for part, product in on_ranks(4, _unsaved, what):
        assert "state 'more' of NAME is a plain tensor of this rank's part" in part
        assert "its rows in another order than the model's" in product


@pytest.mark.parametrize("how", ["tp on 4", "pp2 x zero1"])
def test_one_device_goes_on_from_a_checkpoint_of_ranks(how: str, tmp_path: Path) -> None:
    """As docs/training.md says: one file of it, by torch's functions alone."""
    what, file = emitted(*PLANS[how]), str(tmp_path / "one.pt")
    on_ranks(what[1].plan.ranks, save, what, str(tmp_path / "saved"))
    dcp_to_torch_save(tmp_path / "saved", file)
    saved = torch.load(file)
    plain = load(spec(MODEL), batch=BATCH, seq=8, device="cpu", train=True, labels=True).model.double()
    plain.load_state_dict(saved["model"])
    step = optimizer(plain.parameters())
    set_optimizer_state_dict(plain, step, saved["optimizer"])
    plain(**what[1].batch)[0].backward()
    step.step()
    for name, wanted in alone(2).items():
        torch.testing.assert_close(plain.get_parameter(name).detach(), wanted, rtol=1e-9, atol=1e-9)
