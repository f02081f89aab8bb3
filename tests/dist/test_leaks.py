"""What a step, an evaluation or a forward for nothing makes is gone when it is over: as many tensors are alive after
twenty of them as after three."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import autopar
from autopar.compiled import Compiled
from autopar.runtime import ShardedModule
from autopar.runtime.regather import _registry
from tests.dist.test_loaders import Model, dataset
from tests.helpers.ranks import living


def _train(model: ShardedModule, batch: Sequence[Tensor]) -> None:
    model.train_step(*batch)
    model.zero_grad()


def _evaluate(model: ShardedModule, batch: Sequence[Tensor]) -> None:
    """Without `no_grad`, as people forget."""
    model.eval()
    model(*batch)
    model.train()


def _twice(model: ShardedModule, batch: Sequence[Tensor]) -> None:
    model(*batch)
    model(*batch).backward()
    model.zero_grad()


KINDS: dict[str, Callable[[ShardedModule, Sequence[Tensor]], None]] = {
    "train": _train,
    "evaluate": _evaluate,
    "twice": _twice,
}
FAST = [("zero3", "full", True), ("1f1b", "auto", False)]
SLOW = [
    case
    for recipe in ("ddp", "zero1", "zero3", "tp_sp", "gpipe", "zero_bubble")
    for remat in ("auto", "selective", "full")
    for frozen in (False, True)
    if (case := (recipe, remat, frozen)) not in FAST
]


@cache
def compiled(recipe: str, remat: str, frozen: bool) -> tuple[Compiled, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, ids = Model(), torch.zeros(8, 8, dtype=torch.int64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "bias" in name)
    return autopar.compile(model, "cpu:1x2", (ids, ids), recipe=recipe, remat=remat, time_limit_s=10.0), dict(
        model.state_dict()
    )


def _alive(made: Compiled, weights: dict[str, Tensor], kind: str) -> tuple[list[int], int]:
    """One rank: tensors that are alive after each of twenty, and gathered weights that are still known in the end."""
    model = made.bundle.build(weights)
    batch, counts = model.shard_batch(*(part[:8] for part in dataset().tensors)), []
    for _ in range(20):
        KINDS[kind](model, batch)
        gc.collect()
        counts.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))
    return counts, len(_registry)


@pytest.mark.parametrize(
    ("recipe", "remat", "frozen"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_nothing_stays(recipe: str, remat: str, frozen: bool) -> None:
    made, weights = compiled(recipe, remat, frozen)
    for kind in ("train", "evaluate") if made.plan.pipelined else KINDS:
        for counts, gathered in living(2).run(_alive, Compiled(made.bundle), weights, kind):
            # threads of collectives let go of some a little later
            assert min(counts[-5:]) <= max(counts[:3]) and not gathered, (kind, counts)
