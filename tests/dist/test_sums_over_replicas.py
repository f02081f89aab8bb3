"""Gradients of weights that are gathered over one axis and summed over another one (HSDP): the sums begin while the
backward goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.gradient_buckets import Bucket
from autopar.runtime.gradsync import GradSync
from autopar.verify.step import RankCase
from tests.helpers.ranks import on_ranks
from tests.helpers.verify import planned, subject


def _summed(source: str, rank_case: RankCase) -> tuple[list[int], dict[str, Tensor | None], dict[str, Tensor | None]]:
    """One rank: how many buckets begin in a backward before it ends, in each of two steps, where no whole gradient
    waits behind another block; its gradients, and those of a step as it is."""
    module, early = rank_case.build(source), list[int]()
    batch = module.shard_batch(**rank_case.batch)
    sync: GradSync = module._sync
    module.train_step(*batch)
    wanted = module.full_grads()
    sync.fill([held for held in module._held.values() if held.info.trainable], 1)
    sync.scatters.limit_bytes = 0
    begin, finish, ending = sync._start, sync._finish, list[bool]()

    def started(bucket: Bucket) -> None:
        early[-1] += not ending
        begin(bucket)

    def finished(*, more: bool | None = None) -> None:
        ending.append(True)
        finish(more=more)

    sync._start, sync._finish = started, finished  # type: ignore[method-assign]
    for _ in range(2):
        module.zero_grad()
        early.append(0)
        ending.clear()
        module.train_step(*batch)
    return [*early, len(sync.buckets)], module.full_grads(), wanted


def test_sums_over_replicas_begin_in_the_backward() -> None:
    """torch 2.13 tells of leaves whose gradients all went elsewhere, which was taken for a part of them: every sum
    waited for the end."""
    who = subject("gpt")
    case = who.case(planned(who, (2, 2), "hsdp"))
    for (first, second, buckets), found, wanted in on_ranks(4, _summed, case.source(), case.rank_case):
        assert first == second >= buckets - 2 > 2
        for name, grad in wanted.items():
            assert grad is not None and found[name] is not None, name
            torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12)
