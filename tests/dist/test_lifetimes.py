"""A module that nobody holds any more leaves nothing behind: weights, gradients and state of optimizers go at once,
without the garbage collector, which does not see through hooks of tensors. Pipelines wait for it: torch's schedules and
their stages hold each other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from autopar._torch import local_of
from autopar.bundle import Bundle
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.plan import Plan
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_recipe, by_stages, planned, subject
from tests.helpers.zero_plans import offloaded


def _trained(bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> list[weakref.ref[Tensor]]:
    module = bundle.build(weights)
    inputs = module.shard_batch(**batch)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module.train_step(*inputs)
        optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    held = [tensor for each in module._held.values() for tensor in (each.leaf, each.tensor)]
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert held and state and grads
    return [weakref.ref(local_of(tensor)) for tensor in (*held, *state, *grads)]


def left(bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The shapes of the tensors that are left of a module that was trained, and is gone."""
    gc.collect()
    gc.disable()
    try:
        refs = _trained(bundle, weights, batch)
        if bundle.plan.places > 1:
            gc.collect()
        return [tuple(found.shape) for ref in refs if (found := ref()) is not None]
    finally:
        gc.enable()


def made(who: Subject, how: str) -> Plan:
    """A plan for two ranks."""
    if "offload" in how:
        return offloaded(who, (2,), how)
    return (
        by_stages(who, (1,), "ddp", 2, 4, how, 1)
        if how in ("1f1b", "gpipe")
        else planned(who, (1,), how)
        if how == "single"
        else by_recipe(who, (2,), how)
    )


@pytest.mark.parametrize(
    "how", ["single", "ddp", "zero1", "zero3", "tp_sp", "zero_offload", "optimizer_offload", "1f1b"]
)
def test_nothing_is_left_of_a_module(how: str) -> None:
    who = subject("gpt")
    plan = made(who, how)
    bundle = Bundle(plan, emit(who.captured.gm, plan, Names.of(who.captured)), who.captured.constants)
    assert living(plan.ranks).run(left, bundle, dict(who.weights), who.batch(8, 8)) == [[]] * plan.ranks


def behind(bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a backward of a module that is there, and of one behind a module that is gone."""
    grads = []
    for gone in (False, True):
        module = bundle.build(weights)
        parameters = list(module.parameters())
        loss, *_ = _values(module(*module.shard_batch(**batch)))
        if gone:
            del module
        loss.backward()
        grads.append([local_of(p.grad).clone() for p in parameters if p.grad is not None])
    return grads[0], grads[1]


def _values(outputs: object) -> list[Tensor]:
    values = (
        outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (tuple, list)) else [outputs]
    )
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


@pytest.mark.parametrize("how", ["ddp", "zero1", "zero3"])
def test_the_backward_of_a_module_that_is_gone_reaches_its_parameters(how: str) -> None:
    who = subject("gpt")
    plan = made(who, how)
    bundle = Bundle(plan, emit(who.captured.gm, plan, Names.of(who.captured)), who.captured.constants)
    for there, gone in living(2).run(behind, bundle, dict(who.weights), who.batch(8, 8)):
        assert len(there) == len(gone) > 0 and all(map(torch.equal, there, gone))
