"""A training of several steps as people write it: groups of parameters, accumulation, clipping, a rate that falls,
evaluation in between, a checkpoint that goes on under another plan. Everything that it says is what one device says
that never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, optim

from autopar.plan import Plan
from autopar.runtime import ShardedModule
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_chance, by_recipe, by_stages, subject

STEPS, HALF, RATE = 8, 4, 1e-2
Said = tuple[list[float], dict[str, Tensor]]


def _batches(rank_case: RankCase) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
            if value.is_floating_point()
            else value[torch.randperm(len(value), generator=generator)]
            for name, value in rank_case.batch.items()
        }


def _optimizer(module: ShardedModule) -> optim.Optimizer:
    parameters = list(module.parameters())
    return optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        RATE,
    )


def _lived(source: str, rank_case: RankCase, start: int, stop: int, folder: str) -> Said:
    """One rank: what it says in the steps `[start, stop)`, and its weights behind them. It begins with what is in
    `folder`, or leaves it there."""
    module = rank_case.build(source)
    optimizer, said = _optimizer(module), list[float]()
    if start:
        state = {"model": module.state_dict(), "optimizer": module.optimizer_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=folder)
        module.load_state_dict(state["model"])
        module.load_optimizer_state_dict(optimizer, state["optimizer"])
    for number, batch in enumerate(_batches(rank_case)):
        if start <= number < stop:
            mine = module.shard_batch(**batch)
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - number / STEPS)
            said += [
                float(module.train_step(*mine)),
                float(module.train_step(*mine)),
                float(module.clip_grad_norm_(0.5)),
            ]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                said.append(float(module.eval()(*mine)["loss"]))
            module.train()
    if folder and not start:
        dcp.save(
            {"model": module.state_dict(), "optimizer": module.optimizer_state_dict(optimizer)}, checkpoint_id=folder
        )
    return said, module.full_state_dict()


PLANS: dict[str, Callable[[Subject], Plan]] = {
    "zero3": lambda who: by_recipe(who, (2,), "zero3"),
    "zero1": lambda who: by_recipe(who, (2,), "zero1"),
    "megatron": lambda who: by_recipe(who, (2,), "megatron"),
    "random": lambda who: by_chance(who, (2, 2), 3),
    "1f1b": lambda who: by_stages(who, (1,), "single", 2, 2, "1f1b"),
    "zbv": lambda who: by_stages(who, (1,), "single", 2, 4, "zbv_zero_bubble", 2),
}
PAIRS = [
    ("zero3", "megatron"),
    ("1f1b", "zero1"),
    ("megatron", "1f1b"),
    ("random", "zbv"),
    ("zbv", "zero3"),
    ("zero1", "random"),
]


def _run(who: Subject, made: Plan, *more: object) -> list[Said]:
    case = who.case(made)
    found: list[Said] = living(made.ranks).run(_lived, case.source(), case.rank_case, *more)
    return found


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("hf-gpt2", "1f1b", "zero1"),
        ("gpt", "random", "zbv"),
        *(
            pytest.param(name, *pair, marks=pytest.mark.slow)
            for name in ("hf-gpt2", "hf-llama", "hf-t5", "hf-resnet")
            for pair in PAIRS
            if name != "hf-resnet" or not {"1f1b", "zbv"} & {*pair}
        ),
    ],
)
def test_a_life_on_ranks_is_that_on_one_device(name: str, first: str, then: str, tmp_path: Path) -> None:
    who, folder = subject(name), str(tmp_path / "saved")
    ((wanted, weights),) = _run(who, by_recipe(who, (1,), "single"), 0, STEPS, "")
    before = [said for said, _ in _run(who, PLANS[first](who), 0, HALF, folder)]
    for said, found in _run(who, PLANS[then](who), HALF, STEPS, folder):
        for early in before:
            assert early + said == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        for parameter, value in found.items():
            torch.testing.assert_close(value, weights[parameter], rtol=1e-8, atol=1e-8)
