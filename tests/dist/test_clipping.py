"""Clipping by the global norm on ranks and over pipeline stages equals torch's on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.plan import Plan
from autopar.verify.reference import train_step
from autopar.verify.step import Light
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_recipe, by_stages, subject

NORM = 1e-3


def _clipped(source: str, light: Light) -> tuple[float, dict[str, Tensor]]:
    """One rank: the norm, and what it holds whole of its gradients afterwards."""
    module = light.build(source)
    module.train_step(*module.shard_batch(**light.batch))
    norm = module.clip_grad_norm_(NORM)
    return float(norm), {name: grad for name, grad in module.full_grads().items() if grad is not None}


FLAT: dict[str, Callable[[Subject], Plan]] = {
    "tp": lambda who: by_recipe(who, (2,), "tp"),
    "zero3": lambda who: by_recipe(who, (4,), "zero3"),
}
STAGED: dict[str, Callable[[Subject], Plan]] = {
    "1f1b": lambda who: by_stages(who, (2,), "tp", 2, 2, "1f1b"),
    "zbv": lambda who: by_stages(who, (1,), "single", 2, 4, "zbv_zero_bubble", 2),
}


@pytest.mark.parametrize("plan", FLAT)
def test_the_norm_is_that_of_one_device(plan: str) -> None:
    _right(FLAT[plan])


@pytest.mark.parametrize("plan", STAGED)
def test_the_norm_over_stages_is_that_of_one_device(plan: str) -> None:
    _right(STAGED[plan])


def _right(plan: Callable[[Subject], Plan]) -> None:
    who = subject("hf-gpt2")  # tied: both ends of the pipeline hold the table
    made = plan(who)
    case = who.case(made)
    wanted = train_step(case.gm, {**case.weights, **case.constants}, case.batch, training=True)["gradient"]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in wanted.values()]
    for p, g in zip(params, wanted.values(), strict=True):
        p.grad = g.clone()
    norm = float(torch.nn.utils.clip_grad_norm_(params, NORM))
    expected = {name: p.grad for name, p in zip(wanted, params, strict=True)}
    results = living(made.ranks).run(_clipped, case.source(), case.light)
    seen: dict[str, None] = {}
    for got, grads in results:
        assert got == pytest.approx(norm, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-15)
            seen[name] = None
    assert set(seen) == set(expected)
