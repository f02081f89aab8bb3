"""Gradients add up over several steps, those of weights on several places too; and when they are summed over ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.count import count
from autopar.runtime.places import PIPELINE_AXIS
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import by_stages, subject


def _accumulated(source: str, rank_case: RankCase) -> tuple[dict[str, Tensor], dict[str, Tensor], set[float]]:
    """One rank: whole gradients after one step, and after two more without clearing them, with one in between that ends
    in an error on all ranks before its stages run; and the losses."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)
    losses = {float(module.train_step(*batch))}
    first = {name: grad.clone() for name, grad in module.full_grads().items() if grad is not None}
    with mock.patch.object(module, "totals", side_effect=MemoryError), pytest.raises(MemoryError):
        module.train_step(*batch)
    with mock.patch.object(
        dist, "broadcast_object_list", side_effect=AssertionError("what the loss is like is known by now")
    ):
        losses |= {float(module.train_step(*batch)) for _ in range(2)}
    return first, {name: grad for name, grad in module.full_grads().items() if grad is not None}, losses


def test_three_steps_give_three_times_the_gradient() -> None:
    who = subject("hf-gpt2")  # the table is on the first and on the last place
    case = who.case(by_stages(who, (1,), "single", 2, 2, "1f1b"))
    results = living(2).run(_accumulated, case.source(), case.rank_case)
    assert len({loss for *_, losses in results for loss in losses}) == 1
    for first, last, _ in results:
        assert "transformer.wte.weight" in first
        for name, grad in first.items():
            error = float((last[name] - 3 * grad).abs().max())
            assert error <= 1e-12 * max(1.0, float(grad.abs().max())), (name, error)


def _in_order(source: str, rank_case: RankCase) -> list[str]:
    """One rank of the last place: "send" and "sum", as they begin."""
    module = rank_case.build(source)
    with count() as seen:
        module.train_step(*module.shard_batch(**rank_case.batch))
    return ["send" if each.axis == PIPELINE_AXIS else "sum" for each in seen if each.kind in ("send", "all_reduce")]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"])
def test_sums_of_one_stage_begin_while_another_one_goes_on(schedule: str) -> None:
    """The last place has its second stage's gradients when its first stage is yet to send some back; they waited for
    the end of the step."""
    case = subject("gpt").case(by_stages(subject("gpt"), (2,), "ddp", 2, 2, schedule, 2))
    for kinds in living(4).run(_in_order, case.source(), case.rank_case)[2:]:
        assert "sum" in kinds[: len(kinds) - 1 - kinds[::-1].index("send")]
        assert kinds[-1] == "sum"
