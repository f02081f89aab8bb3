"""What a rank does for `benchmarks.gpu`: a process of its own builds the module, runs steps, and says what they
took."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from autopar._torch import local_of
from autopar.bundle import Bundle
from autopar.frontend import load
from autopar.profile.attribute import attributed
from autopar.runtime import ShardedModule, pipeline
from autopar.runtime.optimizer_state import optimizer_of

WARM, STEPS, PROFILED = 3, 6, 2


def measured(folder: Path, device: str) -> dict[str, Any]:
    """One case in a process of its own, forked where imports are done and no GPU was touched: the figures of
    `case.json`, and what was measured, until an `error` if there was one."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(folder, device, there), daemon=True)
    child.start()
    there.close()
    about = json.loads((folder / "case.json").read_text())
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {"error": "the process died"}
    child.join()
    return {**about, **found}


def _child(folder: Path, device: str, end: Connection) -> None:
    found: dict[str, Any] = {}
    try:
        _run(folder, json.loads((folder / "case.json").read_text()), device, found)
    except BaseException as error:  # noqa: BLE001  sent to the parent, which shows it
        found |= {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    end.send(found)


def _run(folder: Path, about: Mapping[str, Any], device: str, found: dict[str, Any]) -> None:
    """Fill `found` with what is measured."""
    torch.set_num_threads(4)
    bundle = Bundle.load(folder)
    plan = bundle.plan.on(device)
    if device == "cpu":
        bundle = replace(bundle, source=bundle.source.replace('"cuda"', '"cpu"'))
    else:
        torch.cuda.set_device(0)
    if plan.ranks > 1:
        dist.init_process_group("fake", rank=about["rank"], world_size=plan.ranks)
        pipeline.everywhere = lambda loss, place, mesh: loss  # the loss of another place: nobody tells it
    step = _stepping(bundle, about["batch"])
    found |= dict(
        zip(
            ("measured_s", "launched_s", "allocated_bytes", "reserved_bytes", "held_bytes"),
            _taken(step, device),
            strict=True,
        )
    )
    del step
    _forget(device)
    labelled = (folder / "labelled.py").read_text()
    step = _stepping(
        replace(bundle, source=labelled if device == "cuda" else labelled.replace("'cuda'", "'cpu'")), about["batch"]
    )
    found |= _profiled(step, device)
    del step
    _forget(device)
    if about["alone"]:
        found |= _plain(about, device)


def _stepping(bundle: Bundle, inputs: Mapping[str, Any]) -> Callable[[], None]:
    """A training step of a module with small weights, on random inputs."""
    torch.manual_seed(0)
    module = bundle.build()
    _fill(module)
    batch = module.shard_batch(**{name: _random(*each) for name, each in inputs.items()})
    optimizer = optimizer_of(bundle.plan.optimizer, module.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        module.train_step(*batch)
        optimizer.step()

    return step


def _plain(about: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The model as its author wrote it, under torch's autocast where the plan is of mixed precision: seconds of a step
    and bytes at its peak."""
    loaded = load(about["model"], batch=about["sizes"][0], seq=about["sizes"][1], device=device)
    optimizer = optimizer_of("adamw", loaded.model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=about["mixed"]):
            loss = loaded.model(*loaded.args, **loaded.kwargs)[0]
        loss.backward()
        optimizer.step()

    try:
        return dict(zip(("plain_s", "plain_launched_s", "plain_bytes"), _taken(step, device), strict=False))
    except torch.OutOfMemoryError as error:
        return {"plain_error": str(error)[:200]}


@torch.no_grad()
def _fill(module: ShardedModule) -> None:
    """normal(0, 0.02), ones for vectors called weight, zeros for others: each rank its own part, as nobody compares
    them."""
    constants = module.constant_names()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        local = local_of(tensor)
        if name in constants:
            continue
        if local.dim() > 1 and local.is_floating_point():
            local.normal_(std=0.02)
        else:
            local.fill_(float(name.endswith(("weight", "var"))))


def _random(shape: list[int], dtype: str, below: int) -> Tensor:
    kind = getattr(torch, dtype)
    return torch.randn(shape, dtype=kind) if kind.is_floating_point else torch.randint(below, shape, dtype=kind)


def _taken(step: Callable[[], None], device: str) -> tuple[float, ...]:
    """Seconds of a step and those until it is issued, medians; bytes allocated and reserved at the peak, and allocated
    behind it (not numbers on a CPU)."""
    for _ in range(WARM):
        step()
    _done(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = map(statistics.median, zip(*(_timed(step, device) for _ in range(STEPS)), strict=True))
    held = (
        (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
        if device == "cuda"
        else (math.nan,) * 3
    )
    return *times, *held


def _timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds of a step, and those until the host has issued it."""
    begin = time.perf_counter()
    step()
    launched = time.perf_counter()
    _done(device)
    return time.perf_counter() - begin, launched - begin


def _profiled(step: Callable[[], None], device: str) -> dict[str, Any]:
    """Seconds of kernels in a step: in all, by operator of the plan, and the kernels that take most."""
    step()
    _done(device)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    ) as profiler:
        for _ in range(PROFILED):
            step()
        _done(device)
    events = profiler.events()
    keyed = attributed(events, cuda=device == "cuda")
    kernels: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() * 1e-6 / PROFILED)
    most = sorted(((sum(each), len(each) / PROFILED, name[:120]) for name, each in kernels.items()), reverse=True)
    return {
        "busy_s": sum(seconds for seconds, *_ in most),
        "kernels": most[:40],
        "kernel_count": sum(count for _, count, _ in most),
        "profiled": [[list(key), seconds / PROFILED] for key, seconds in keyed.items()],
    }


def _done(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget(device: str) -> None:
    gc.collect()  # torch's schedules and their stages hold each other
    if device == "cuda":
        torch.cuda.empty_cache()
