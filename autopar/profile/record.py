"""Some steps of a plan on its ranks, and some more under torch.profiler. Runs on ranks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from autopar.bundle import Bundle
from autopar.profile.attribute import Key, attributed
from autopar.runtime.whole_step import step_of

WARM = 2
QUIET = ("KINETO_LOG_LEVEL", "6")
"""Torch's profiler writes lines to stderr on every rank where it begins and ends, at level 5. It reads the variable
where it is used first; one that the user has set stays."""


@dataclass(frozen=True)
class Job:
    """What every rank does: build the module, warm up, `steps` steps that are timed, and as many that are profiled. The
    first rank writes its events to `trace`."""

    bundle: Bundle
    weights: Mapping[str, torch.Tensor]
    batch: Mapping[str, Any]
    steps: int
    trace: str = ""


@dataclass(frozen=True)
class Recorded:
    """Seconds of a step on the slowest rank (the median), of a profiled step on this one (the mean), and of what it is
    made of."""

    step_s: float
    profiled_s: float
    seconds: Mapping[Key, float]


def record(job: Job) -> Recorded:
    """One rank. Raises RunError where the ranks or the batch do not fit the plan."""
    plan, cuda = job.bundle.plan, job.bundle.plan.device_kind == "cuda"
    module = job.bundle.build(job.weights)
    batch = module.shard_batch(**job.batch)
    step = step_of(module, batch, plan.optimizer, 1e-4)
    for _ in range(WARM):
        step()
    times = [_timed(step, cuda) for _ in range(job.steps)]
    os.environ.setdefault(*QUIET)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as profiler:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(job.steps):
            step()
        _done(cuda)
        profiled_s = (time.perf_counter() - begin) / job.steps
    if job.trace and dist.get_rank() == 0:
        profiler.export_chrome_trace(job.trace)
    found = attributed(profiler.events(), cuda=cuda)
    return Recorded(statistics.median(times), profiled_s, {key: seconds / job.steps for key, seconds in found.items()})


def _timed(step: Any, cuda: bool) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    _done(cuda)
    slowest = torch.tensor([time.perf_counter() - begin], device="cuda" if cuda else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _done(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
