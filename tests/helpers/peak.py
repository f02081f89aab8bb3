"""The most memory that a training step really takes on a rank, as torch's profiler sees every allocation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autopar._torch import local_of
from autopar.bundle import Bundle

STEPS, SHORT_STEPS = 3, 40
"""Steps of which the least is taken: threads of gloo let go of what they have sent when they are next scheduled, on a
busy machine much later. Of SHORT_STEPS where there are less than SHORT_BYTES of weights: a step is over then before
they are."""
SHORT_BYTES = 1e6


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank beside what rests at the start of a step: the peak of forward and backward, and that of the
    update."""

    step_bytes: int
    update_bytes: int
    curve: tuple[int, ...] = ()


def allocations(body: Callable[[], Any]) -> list[int]:
    """Bytes that are allocated after each allocation or release in `body`, counted from its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        body()
    events = sorted(
        (e.start_ns(), i, e.nbytes())
        for i, e in enumerate(seen.profiler.kineto_results.events())
        if e.name() == "[memory]"
    )
    return list(accumulate(nbytes for *_, nbytes in events))


def counted_on_rank(
    bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor], *, curve: bool = False
) -> Counted:
    """A step of training and its AdamW update, behind one that has made all state."""
    module = bundle.build(weights)
    inputs = module.shard_batch(**batch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        module.train_step(*inputs)

    curves = []
    step()
    optimizer.step()
    short = sum(weight.nbytes for weight in weights.values()) < SHORT_BYTES
    for _ in range(SHORT_STEPS if short else STEPS):
        optimizer.zero_grad()
        gc.collect()  # what cycles of the step before hold is to go now, not in the middle of what is counted
        curves.append(allocations(step))
    first = min(curves, key=lambda curve: max(curve, default=0))
    second = allocations(optimizer.step)
    storages = [local_of(p.grad).untyped_storage() for p in module.parameters() if p.grad is not None]
    # those of a bucket share one
    gradients = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return Counted(max(first, default=0), gradients + max(second, default=0), tuple(first) if curve else ())
