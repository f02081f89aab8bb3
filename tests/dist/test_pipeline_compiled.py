"""Compiled blocks inside pipeline stages: the gradients are those of blocks that are not compiled, under whole
backwards and under backwards in two parts, which run a compiled block's backward twice and so must keep what it
saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.verify.step import RankCase
from tests.helpers.ranks import on_new_ranks
from tests.helpers.verify import by_stages, subject

PLANS = {"1f1b": ("tp", 2, 2, 1), "interleaved_1f1b": ("zero3", 2, 4, 2), "zbv_zero_bubble": ("single", 1, 4, 2)}
"""Recipe and ranks of a place, microbatches, stages of a place."""


def _compiled(source: str, rank_case: RankCase) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """One rank: whole gradients of two steps, eager and with compiled blocks; how many graphs were compiled."""
    import torch._dynamo.utils as utils

    found, made = [], utils.counters["stats"]["unique_graphs"]  # of the process that these ranks were forked from
    for compiled in (False, True):
        module = rank_case.build(source)
        if compiled:
            module.compile_blocks(backend="aot_eager")
        batch = module.shard_batch(**rank_case.batch)
        for _ in range(2):
            module.train_step(*batch)
        found.append(module.full_grads())
    graphs = utils.counters["stats"]["unique_graphs"] - made
    return {name: (grad, found[1][name]) for name, grad in found[0].items() if grad is not None}, graphs


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[] if name.startswith("zbv") else pytest.mark.slow) for name in PLANS]
)
def test_gradients_are_those_of_eager_blocks(schedule: str) -> None:
    recipe, ranks, micro, virtual = PLANS[schedule]
    who = subject("hf-gpt2")
    made = by_stages(who, (ranks,), recipe, 2, micro, schedule, virtual)
    case = who.case(made)
    results = on_new_ranks(made.ranks, _compiled, case.source(), case.rank_case, timeout_s=240)
    assert sum(graphs for _, graphs in results) >= 1
    for grads, _ in results:
        assert grads
        for name, (eager, compiled) in grads.items():
            torch.testing.assert_close(
                compiled, eager, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
            )
