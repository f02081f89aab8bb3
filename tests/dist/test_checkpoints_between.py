"""Checkpoints of what is frozen between them, and in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import autopar
from autopar.errors import RunError
from tests.dist.test_checkpoints import Unused
from tests.helpers.ranks import on_new_ranks, on_ranks


def _frozen_between() -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    compiled = autopar.compile(Unused(), "cpu:1x2", (x,), recipe="zero3", time_limit_s=5.0)
    step = torch.optim.AdamW(compiled.parameters(), 1e-2)
    compiled.train_step(*compiled.shard_batch(x))
    step.step()
    compiled.module.up.requires_grad_(False)
    saved, step = compiled.optimizer_state_dict(step), torch.optim.AdamW(compiled.parameters(), 1e-2)
    compiled.load_optimizer_state_dict(step, saved)
    return {name: float(step.state[parameter]["step"]) for name, parameter in compiled.named_parameters()}


def test_what_is_frozen_when_a_checkpoint_is_loaded_has_its_state() -> None:
    """It trains again later: as on one device with the moments that it had."""
    assert (
        on_ranks(2, _frozen_between)
        == [{"up.weight": 1, "up.bias": 1, "pooler.weight": 0, "pooler.bias": 0, "down.weight": 1, "down.bias": 1}] * 2
    )


def _frozen_before() -> tuple[list[str], dict[str, float]]:
    """One rank: whose state is saved where `up` was frozen in the only step, and the steps of each parameter after
    loading, thawing and one more step."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    compiled = autopar.compile(Unused(), "cpu:1x2", (x,), recipe="zero1", time_limit_s=5.0)
    step = torch.optim.AdamW(compiled.parameters(), 1e-2)
    compiled.module.up.requires_grad_(False)
    compiled.train_step(*compiled.shard_batch(x))
    step.step()
    saved, step = compiled.optimizer_state_dict(step), torch.optim.AdamW(compiled.parameters(), 1e-2)
    compiled.load_optimizer_state_dict(step, saved)
    compiled.module.up.requires_grad_(True)
    compiled.train_step(*compiled.shard_batch(x))
    step.step()
    return [*saved["state"]], {
        name: float(step.state[p]["step"]) for name, p in compiled.named_parameters() if p.grad is not None
    }


def test_what_was_frozen_before_a_checkpoint_begins_when_it_thaws() -> None:
    rest = ["pooler.weight", "pooler.bias", "down.weight", "down.bias"]
    steps = {"up.weight": 1, "up.bias": 1, "down.weight": 2, "down.bias": 2}
    assert on_ranks(2, _frozen_before) == [(rest, steps)] * 2


def _in_the_background(folder: str, recipe: str) -> list[bool]:
    """One rank: whether what was saved while steps went on is as when it was asked for, and these steps the same again
    from there."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    compiled = autopar.compile(Unused(), "cpu:1x2", (x,), recipe=recipe, time_limit_s=5.0)
    optimizer, aside = torch.optim.AdamW(compiled.parameters(), 1e-2), dist.new_group(backend="gloo")

    def states() -> dict[str, object]:
        return {
            "model": compiled.state_dict(),
            "optimizer": compiled.optimizer_state_dict(optimizer),
            "rng": compiled.rng_state(),
        }

    def train(steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            compiled.train_step(*compiled.shard_batch(x))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in compiled.full_state_dict().items()}

    then = train(2)
    saving = dcp.async_save(states(), checkpoint_id=folder, process_group=aside)
    later = train(4)
    saving.result()
    dist.barrier(aside)
    state = states()
    dcp.load(state, checkpoint_id=folder)
    compiled.load_state_dict(state["model"])
    compiled.load_optimizer_state_dict(optimizer, state["optimizer"])
    compiled.set_rng_state(state["rng"])
    return [
        all(torch.equal(found[name], value) for name, value in wanted.items())
        for wanted, found in ((then, compiled.full_state_dict()), (later, train(4)))
    ]


@pytest.mark.parametrize("recipe", ["zero3", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_checkpoint_in_the_background_is_of_when_it_was_asked_for(recipe: str, tmp_path: Path) -> None:
    assert on_new_ranks(2, _in_the_background, str(tmp_path / "saved"), recipe) == [[True, True]] * 2


def _of_one_rank(recipe: str, folder: str) -> list[str]:
    """One rank: what is said of what rank 0 saved of its own, and whether what each saved for itself is taken."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    compiled = autopar.compile(Unused(), "cpu:1x2", (x,), recipe=recipe, time_limit_s=5.0)
    step = torch.optim.AdamW(compiled.parameters(), 1e-2)
    compiled.train_step(*compiled.shard_batch(x))
    step.step()
    whole, messages = compiled.full_state_dict(), []
    torch.save((compiled.state_dict(), compiled.optimizer_state_dict(step)), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    for rank in (0, dist.get_rank()):
        weights, moments = torch.load(f"{folder}/{rank}.pt")
        for call in (
            lambda w=weights: compiled.load_state_dict(w),
            lambda m=moments: compiled.load_optimizer_state_dict(step, m),
        ):
            try:
                call()
                messages.append("")
            except RunError as error:
                messages.append(str(error))
        assert all(torch.equal(value, whole[name]) for name, value in compiled.full_state_dict().items())
    return messages


@pytest.mark.parametrize("recipe", ["zero3", "ddp"])
def test_the_part_of_another_rank_is_no_checkpoint(recipe: str, tmp_path: Path) -> None:
    """What rank 0 saves by torch.save(state_dict()) was loaded on all ranks, each of which had rank 0's rows then, in
    silence. Where all rest whole it is right."""
    first, second = on_ranks(2, _of_one_rank, recipe, str(tmp_path))
    assert first == [""] * 4 and second[2:] == ["", ""]
    for text in second[:2]:
        assert ("is the part of rank 0, and this is rank 1. torch.save" in text) == (recipe == "zero3")
