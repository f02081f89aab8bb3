"""Optimizers that step otherwise on one rank are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import on_ranks


def _left_out(params: list[nn.Parameter]) -> None:
    optimizer = optim.SGD(params, 0.1)
    optimizer.step()
    if dist.get_rank():
        optimizer.step()


def _plateau(params: list[nn.Parameter]) -> None:
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}], 0.2)
    schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=[0.2, 0.01])
    for number in range(2):
        schedule.step(float(number if dist.get_rank() else -number))
    optimizer.step()


def _alike(params: list[nn.Parameter]) -> None:
    """In another order, with last digits of another host, and of tensors."""
    first, rank = optim.SGD(params[:1], 0.1 + dist.get_rank() * 1e-16), dist.get_rank()
    second = optim.AdamW(params[1:], torch.tensor(0.1))
    for optimizer in (first, second) if rank else (second, first):
        optimizer.step()
    optim.SGD([nn.Parameter(torch.zeros(2))], 0.1 * (1 + rank)).step()  # of something else


def _own(params: list[nn.Parameter]) -> None:
    """Each place of a pipeline has parameters of its own."""
    for _ in range(1 + dist.get_rank()):
        optim.SGD(params, 0.1 * (1 + dist.get_rank())).step()


def _said(recipe: str, step: Callable[[list[nn.Parameter]], None]) -> tuple[str, str]:
    made, batch = compiled(recipe)
    first = said(partial(made.train_step, *batch))
    step(list(made.parameters()))
    return first, said(partial(made.train_step, *batch))


@pytest.mark.parametrize(
    ("recipe", "step", "why"),
    [
        ("ddp", _left_out, "2 in all and 1 in all"),
        ("tp", _left_out, "2 in all and 1 in all"),
        ("zero3", _plateau, "one with lr of group 1 0.05 and one with 0.1"),
        ("zero3", _alike, ""),
        ("1f1b", _own, ""),
    ],
)
def test_steps_of_optimizers(recipe: str, step: Callable[[list[nn.Parameter]], None], why: str) -> None:
    """Replicas drifted apart, and parts of one weight were stepped unlike, in silence."""
    for first, then in on_ranks(2, _said, recipe, step):
        assert not first
        assert (f"optimizers took other steps on rank 1 than on rank 0, {why}: " in then) if why else not then
