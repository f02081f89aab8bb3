"""Several forwards before their backwards, in any order, with evaluations between: gradients are those of one
device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import autopar
from autopar.compiled import Compiled
from autopar.runtime import ShardedModule
from tests.dist.test_loaders import Model, dataset
from tests.helpers.captures import captured_once
from tests.helpers.ranks import living

Batches = list[tuple[Tensor, ...]]


def _together(model: ShardedModule, batches: Batches) -> None:
    sum(model(*batch) for batch in batches).backward()


def _as_they_came(model: ShardedModule, batches: Batches) -> None:
    for loss in [model(*batch) for batch in batches]:
        loss.backward()


def _last_first(model: ShardedModule, batches: Batches) -> None:
    for loss in reversed([model(*batch) for batch in batches]):
        loss.backward()


def _an_evaluation_between(model: ShardedModule, batches: Batches) -> None:
    for batch in batches:
        loss = model(*batch)
        with torch.no_grad():
            model(*batches[0])
        loss.backward()


def _a_step_between(model: ShardedModule, batches: Batches) -> None:
    loss = model(*batches[0])
    model.train_step(*batches[1])
    loss.backward()
    model.train_step(*batches[2])


def _a_forward_for_nothing(model: ShardedModule, batches: Batches) -> None:
    model(*batches[0])
    for batch in batches:
        model(*batch).backward()


ORDERS: dict[str, Callable[[ShardedModule, Batches], None]] = {
    "together": _together,
    "as they came": _as_they_came,
    "last first": _last_first,
    "evaluation between": _an_evaluation_between,
    "step between": _a_step_between,
    "for nothing": _a_forward_for_nothing,
}
RECIPES = {"ddp": 2, "zero1": 2, "zero3": 2, "tp_sp": 2, "tp_zero3": 4, "hsdp": 4}
FAST = [
    *(("tp_zero3", order) for order in ORDERS),
    *(("zero3", order) for order in ORDERS),
    ("zero1", "together"),
    ("zero1", "evaluation between"),
    ("hsdp", "step between"),
]


@cache
def compiled(recipe: str) -> Compiled:
    ids = torch.zeros(8, 8, dtype=torch.int64)
    cluster = f"cpu:1x{RECIPES[recipe]}"
    with captured_once(Model):
        return autopar.compile(Model().double(), cluster, (ids, ids), recipe=recipe, time_limit_s=10.0)


def batches() -> Batches:
    return [tuple(part[at : at + 8] for part in dataset().tensors) for at in (0, 8, 16)]


def _gradients(made: Compiled, weights: dict[str, Tensor], order: str) -> dict[str, Tensor | None]:
    model = made.bundle.build(weights)
    ORDERS[order](model, [model.shard_batch(*batch) for batch in batches()])
    return model.full_grads()


@pytest.mark.parametrize(
    ("recipe", "order"),
    [
        *FAST,
        *(
            pytest.param(recipe, order, marks=pytest.mark.slow)
            for recipe in RECIPES
            for order in ORDERS
            if (recipe, order) not in FAST
        ),
    ],
)
def test_gradients_are_those_of_one_device(recipe: str, order: str) -> None:
    torch.manual_seed(0)
    model = Model().double()
    ran = living(RECIPES[recipe]).run(_gradients, Compiled(compiled(recipe).bundle), dict(model.state_dict()), order)
    sum(model(*batch) for batch in batches()).backward()
    for grads in ran:
        for name, parameter in model.named_parameters():
            found = grads[name]
            assert (
                found is not None
                and parameter.grad is not None
                and torch.allclose(found, parameter.grad, rtol=1e-9, atol=1e-12)
            ), name
