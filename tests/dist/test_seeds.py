"""Seeds of what is drawn at random: `torch.manual_seed` before a model is built, the same on all ranks, another one for
each model; and a run that goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import autopar
from autopar.errors import RunError
from tests.helpers.ranks import on_new_ranks, on_ranks

WIDTH = 32


class Noisy(nn.Module):
    """A product and a random mask, which is also an output, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (torch.rand(WIDTH, dtype=x.dtype) < 0.5).to(x.dtype)
        return (self.linear(x) * mask).square().mean(), mask


def made(folder: Path | None = None) -> autopar.Compiled:
    """The model on these ranks: planned, or as it was saved."""
    return (
        autopar.load(folder).load_full(Noisy().state_dict())
        if folder
        else autopar.compile(Noisy(), "cpu:1x2", (torch.zeros(4, WIDTH),), recipe="ddp", time_limit_s=5.0)
    )


def masks(model: autopar.Compiled, steps: int = 1) -> list[list[float]]:
    """The masks of the next steps, from ranks that all have the same."""
    found = [model(*model.shard_batch(torch.ones(4, WIDTH)))[1].tolist() for _ in range(steps)]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, found)
    assert everyone[0] == everyone[1], "replicas draw the same"
    return found


def _seeded() -> None:
    torch.manual_seed(1)
    models = [made(), made()]
    first, second = (masks(model, 2) for model in models)
    torch.manual_seed(1)
    assert masks(made(), 2) == first, "the seed makes them reproducible"
    torch.manual_seed(2)
    other = masks(made(), 2)
    distinct = {tuple(mask) for mask in (*first, *second, *other)}
    assert len(distinct) == 6, "seeds, models of one process and steps have other masks"


def test_torch_manual_seed_counts_and_each_model_draws_its_own() -> None:
    on_ranks(2, _seeded)


def _apart(folder: Path) -> None:
    torch.manual_seed(7)
    model = made()
    if dist.get_rank() == 0:
        model.save(folder)
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    loaded = autopar.load(folder)
    seeds: list[Any] = [None, None]
    dist.all_gather_object(seeds, loaded.rng_state())
    assert seeds[0] == seeds[1], "the seed of rank 0 is taken"
    torch.manual_seed(0)
    assert loaded.rng_state() == autopar.load(folder).rng_state()


def test_ranks_that_are_seeded_apart_draw_as_the_first(tmp_path: Path) -> None:
    on_ranks(2, _apart, tmp_path / "plan")


def made_at(state: dict[str, int]) -> autopar.Compiled:
    """The model with the random numbers of a run that is there."""
    model = made()
    model.set_rng_state(state)
    return model


@torch.no_grad()
def _evaluated(model: autopar.Compiled) -> list[list[float]]:
    """The masks of an evaluation of two batches."""
    model.eval()
    found = masks(model, 2)
    model.train()
    return found


def _goes_on(folder: Path) -> None:
    torch.manual_seed(3)
    model = made()
    masks(model, 2)
    dcp.save({"model": model.state_dict(), "rng": model.rng_state()}, checkpoint_id=folder)
    wanted = masks(made_at(model.rng_state()), 2)
    evaluated = _evaluated(model)
    assert masks(model, 2) == wanted, "an evaluation changes nothing of what comes"
    assert len({tuple(mask) for mask in (*evaluated, *wanted)}) == 4
    torch.manual_seed(4)
    again = made()
    state = {"model": again.state_dict(), "rng": again.rng_state()}
    assert list(state["model"]) == ["linear.weight", "linear.bias"]
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    again.set_rng_state(state["rng"])
    assert masks(again, 2) == wanted
    for wrong in ({"seed": 1}, {"seed": 1, "step": -1}, {"seed": 1.0, "step": 1}, None):
        with pytest.raises(RunError, match=r"wanted what rng_state\(\) gave"):
            again.set_rng_state(wrong)  # type: ignore[arg-type]


def test_a_run_that_goes_on_draws_what_comes_next(tmp_path: Path) -> None:
    on_ranks(2, _goes_on, tmp_path / "checkpoint")


def _unlike() -> None:
    model = made()
    model.set_rng_state({"seed": dist.get_rank(), "step": 0})
    model(*model.shard_batch(torch.ones(4, WIDTH)))


def test_seeds_that_ranks_set_apart_are_refused() -> None:
    with pytest.raises(RunError, match="ranks draw random numbers from seeds of their own, 0 to 1"):
        on_new_ranks(2, _unlike)
