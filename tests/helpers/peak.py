"""The most memory that a step really takes on a rank, as torch's profiler sees every allocation."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autopar._torch import local_of
from autopar.bundle import Bundle
from autopar.memory import Place
from autopar.memory.place import OUTPUTS, SUMS, WEIGHTS
from tests.helpers.ranks import living

STEPS, MORE_STEPS = 3, 40
"""Steps of which the least is taken, and how many at most while some rank took more than it may: threads of gloo let go
of what they have sent when they are next scheduled, which may be after a short step is over."""
STATE = ("weights", "master", "optimizer", "buffers", "inputs")  # there before a step begins
STEP = ("forward", "backward", WEIGHTS, SUMS, OUTPUTS)


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


def beside_state(place: Place, *phases: str) -> float:
    """The predicted peak of some phases, without what is there before the step."""
    return max(place.phases.get(phase, 0.0) for phase in phases) - sum(place.rest.get(kind, 0.0) for kind in STATE)


def is_counted(
    places: Sequence[Place],
    bundle: Bundle,
    weights: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    within: float,
) -> list[int]:
    """Assert that the peak of a step is predicted for each place as it is counted on those of its ranks that has most.
    Gives what is counted on every rank, in bytes."""
    predicted, ranks = [beside_state(place, *STEP) for place in places], bundle.plan.ranks // len(places)
    may_take = [nbytes / (1 - within) for nbytes in predicted for _ in range(ranks)]
    seen = living(bundle.plan.ranks).run(counted_on_rank, bundle, dict(weights), dict(batch), may_take)
    for number, nbytes in enumerate(predicted):
        most = max(seen[number * ranks : (number + 1) * ranks])
        assert nbytes == pytest.approx(most, rel=within), f"place {number}"
    return seen


def counted_on_rank(
    bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor], may_take: Sequence[float] | None = None
) -> int:
    """The peak of forward and backward, or of a forward alone, on one rank, beside what rests at the start of a
    step, in bytes. `may_take`: that of each rank at most."""
    module = bundle.build(weights)
    inputs = module.shard_batch(**batch)

    def step() -> None:
        if bundle.plan.mode == "train":
            module.train_step(*inputs)
        else:
            module(*inputs)

    most = math.inf if may_take is None else may_take[dist.get_rank()]
    peaks: list[int] = []
    step()
    while len(peaks) < STEPS or (len(peaks) < MORE_STEPS and _on_any_rank(min(peaks) > most)):
        module.zero_grad()
        gc.collect()  # what cycles of the step before hold is to go now, not in the middle of what is counted
        peaks.append(max(allocations(step), default=0))
    return min(peaks)


def update_on_rank(bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> int:
    """Bytes of the gradients on one rank, and of what an AdamW update takes, behind one that has made all state."""
    module = bundle.build(weights)
    module.train_step(*module.shard_batch(**batch))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    optimizer.step()
    update = allocations(optimizer.step)
    storages = [local_of(p.grad).untyped_storage() for p in module.parameters() if p.grad is not None]
    # those of a bucket share one
    gradients = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return gradients + max(update, default=0)


def _on_any_rank(so: bool) -> bool:
    """Whether it is so on this rank or on another one."""
    found = torch.tensor(float(so))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
