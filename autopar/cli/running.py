"""`autopar run`: some training steps of a plan on random data, on local ranks or on those of torchrun."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar import torchrun
from autopar.bundle import Bundle
from autopar.cli.console import progress, write_json
from autopar.cli.emitting import bundle
from autopar.cli.rebuild import rebuild
from autopar.plan import Plan
from autopar.runtime import launch
from autopar.runtime.process_group import joined
from autopar.runtime.whole_step import step_of
from autopar.text import seconds


@dataclass(frozen=True)
class Job:
    """What every rank does: build the module from `bundle`, fill it with `weights`, take its part of the global
    `batch`, and run `steps` steps. `quiet` ranks print nothing."""

    bundle: Bundle
    weights: Mapping[str, torch.Tensor]
    batch: Mapping[str, Any]
    steps: int
    lr: float
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the global loss (None in inference) and its seconds on rank 0."""

    loss: float | None
    step_s: float


def run_command(where: Path, steps: int, lr: float, json: str | None) -> None:
    """Run the plan; on as many local ranks as it has unless torchrun has made them."""
    with progress(f"preparing {where}") as tell:
        rebuilt = rebuild(where, tell, weights=True)
        rebuilt = dataclasses.replace(rebuilt, plan=placed(rebuilt.plan))
        job = Job(bundle(rebuilt), rebuilt.weights, rebuilt.batch, steps, lr, quiet=json == "-")
    if torchrun.ranks():
        with joined(rebuilt.plan.device_kind) as rank:
            done, first = train(job), rank == 0
    else:
        done, first = launch(train, rebuilt.plan.ranks, job, device_type=rebuilt.plan.device_kind)[0], True
    if first:
        write_json(
            json,
            {
                "ranks": rebuilt.plan.ranks,
                "predicted_step_s": rebuilt.plan.predicted.step_s,
                "steps": [dataclasses.asdict(step) for step in done],
            },
        )


def train(job: Job) -> list[Step]:
    """One rank: all steps. Raises RunError when the ranks or the batch do not fit the plan."""
    plan = job.bundle.plan
    module = job.bundle.build(job.weights)
    batch = module.shard_batch(**job.batch)
    step, done = step_of(module, batch, plan.optimizer, job.lr), list[Step]()
    for number in range(job.steps):
        start = time.perf_counter()
        found = step()
        loss = None if found is None else float(found)
        done.append(Step(loss, time.perf_counter() - start))
        if dist.get_rank() == 0 and not job.quiet:
            said = "" if loss is None else f"loss {loss:.6f}, "
            print(
                f"step {number}: {said}{seconds(done[-1].step_s)} (predicted {seconds(plan.predicted.step_s)})",
                flush=True,
            )
    return done


def placed(plan: Plan) -> Plan:
    """The plan for the devices at hand: on CPU ranks where there are fewer CUDA devices than it needs here."""
    local = torchrun.local_ranks() or plan.ranks
    if plan.device_kind == "cpu" or torch.cuda.device_count() >= local:
        return plan
    return plan.on("cpu")
