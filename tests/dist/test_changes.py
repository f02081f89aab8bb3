"""Optimizers that step otherwise on one rank, and what one rank loads alone, are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import on_ranks

UNLIKE = "rank 1 and rank 0 changed their parts of the model unlike"


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
        ("ddp", _left_out, "2 times step() of an optimizer on rank 1, 1 times on rank 0"),
        ("tp", _left_out, "2 times step() of an optimizer on rank 1, 1 times on rank 0"),
        ("zero3", _plateau, "step() of an optimizer with lr of group 1 0.05 on rank 1, 0.1 on rank 0"),
        ("zero3", _alike, ""),
        ("1f1b", _own, ""),
    ],
)
def test_steps_of_optimizers(recipe: str, step: Callable[[list[nn.Parameter]], None], why: str) -> None:
    """Replicas drifted apart, and parts of one weight were stepped unlike, in silence."""
    for first, then in on_ranks(2, _said, recipe, step):
        assert not first
        assert (UNLIKE in then and why in then) if why else not then


OTHERS = "load_full() with values"


def _loaded(what: str) -> str:
    """What is said where rank 0 does not load `what`, or each rank loads other values."""
    made, batch = compiled("zero3")
    optimizer, rank = optim.AdamW(made.parameters()), dist.get_rank()
    whole, state, moments = made.full_state_dict(), made.state_dict(), made.optimizer_state_dict(optimizer)
    loads: dict[str, Callable[[], object]] = {
        "load_full()": lambda: made.load_full({n: t + (rank if what == OTHERS else 0) for n, t in whole.items()}),
        "others": lambda: made.load_full(
            {n: t.to_sparse() for n, t in whole.items()} | {"more": torch.empty(2, device="meta")}, strict=False
        ),
        "load_state_dict()": lambda: made.load_state_dict(state),
        "load_optimizer_state_dict()": lambda: made.load_optimizer_state_dict(optimizer, moments),
    }
    for name, load in loads.items():
        if rank or name != what:
            load()
    return said(partial(made.train_step, *batch))


@pytest.mark.parametrize("what", [OTHERS, "load_full()", "load_state_dict()", "load_optimizer_state_dict()", ""])
def test_what_one_rank_loads_alone(what: str) -> None:
    """Of weights that are all cut no copies are compared: a rank trained its part of another model, in silence."""
    for text in on_ranks(2, _loaded, what):
        assert (UNLIKE in text and what in text) if what else not text
