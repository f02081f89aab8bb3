"""A calibration: jobs for ranks, one after the other; then the fits; then a cluster."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar import torchrun
from autopar.calibrate import background, fit_device, fit_level, machine, network
from autopar.calibrate.clock import Clock
from autopar.calibrate.fits import Fits
from autopar.calibrate.samples import Sample
from autopar.cluster import Cluster, Device
from autopar.cluster.this_machine import cores_here, machine_bytes, match
from autopar.errors import ClusterError
from autopar.runtime.launch import Ranks
from autopar.text import gibibytes

DTYPES = ("float32", "bfloat16", "float16", "float64")
SECONDS = 60.0
"""How long a calibration takes by default, about."""

LEAST_S, MOST_S = 1.0, 3600.0
"""How long it may take. Longer windows give the same means, and ranks that need more than ten minutes for one job are
taken to hang."""

RANK_BYTES = 450 << 20
"""Memory that one CPU rank takes at its peak and shares with no other: torch, and what the measurements hold (VmHWM
less shared pages on 1, 2 and 4 ranks: 330 to 424 MiB)."""

WINDOW = 1e-3
"""The window of one measurement, as a share of the whole."""

Job = Callable[[Clock], list[Sample]]
Team = Callable[[Job, Clock], list[Sample]]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Calibration:
    """What was found: the cluster, how well each constant fits, what was left out, and all samples."""

    cluster: Cluster
    fits: Fits
    samples: tuple[Sample, ...]


def calibrate(
    device: str = "cpu", ranks: int = 4, *, seconds: float = SECONDS, progress: Progress | None = None
) -> Calibration:
    """Measure this machine with `ranks` local ranks (gloo on "cpu", NCCL on "cuda") of one thread each, in about
    `seconds`.

    With torch.distributed initialised it runs on the ranks that there are instead, on each of them. Raises ClusterError
    for a device without a preset, too few ranks, more than the memory or the GPUs of the machine are for, or `seconds`
    out of range, RunError where a rank fails.
    """
    if not LEAST_S <= seconds <= MOST_S:
        raise ClusterError(
            f"a calibration of {seconds:g} seconds; wanted {LEAST_S:g} to {MOST_S:g}, about as long as it takes in all"
        )
    say = progress or (lambda done, total, what: None)
    if dist.is_initialized():
        return measure(_here, here(device), _local(), seconds, say)
    base = here(device)
    if ranks < 1:
        raise ClusterError(f"a calibration on {ranks} ranks; wanted 1 or more")
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise ClusterError(f"a calibration on {ranks} GPUs, but this machine has {torch.cuda.device_count()}")
    if device == "cpu" and ranks * RANK_BYTES > machine_bytes():
        raise ClusterError(
            f"a calibration on {ranks} ranks takes {gibibytes(ranks * RANK_BYTES)} of memory, and this machine has "
            f"{gibibytes(machine_bytes())}: wanted at most {machine_bytes() // RANK_BYTES} (--ranks)"
        )
    with Ranks(ranks, device_type=device) as team:
        return measure(lambda job, clock: team.run(job, clock)[0], base, (1, ranks), seconds, say)


def here(device: str) -> Cluster:
    """The preset of this machine's devices: what is not measured comes from it."""
    if device == "cpu":
        return Cluster.parse("cpu")
    if device != "cuda" or not torch.cuda.is_available():
        raise ClusterError(f"a calibration of {device!r} devices; wanted cpu, or cuda on a machine that has such")
    properties = torch.cuda.get_device_properties(0)
    return Cluster.parse(match(properties.name, properties.total_memory))


def measure(team: Team, base: Cluster, sizes: tuple[int, int], seconds: float, progress: Progress) -> Calibration:
    """Run all jobs by `team` on (nodes, ranks per node) of `sizes`, and fit the constants of `base`."""
    return fitted(base, sizes, taken(team, base, sizes, seconds, progress))


def taken(
    team: Team, base: Cluster, sizes: tuple[int, int], seconds: float, progress: Progress, cores: int = 0
) -> list[tuple[int, Sample]]:
    """All samples of one calibration, each with its level (-1: of a device); `cores` as Clock has it."""
    clock = Clock(base.device.kind, window_s=WINDOW * seconds, cores=cores)
    jobs = _jobs(sizes)
    samples: list[tuple[int, Sample]] = []
    for number, (what, level, job) in enumerate(jobs):
        progress(number, len(jobs), what)
        samples += [(level, sample) for sample in team(job, clock)]
    progress(len(jobs), len(jobs), "fitting")
    return samples


def _jobs(sizes: tuple[int, int]) -> list[tuple[str, int, Job]]:
    """(what, level or -1 for a device, job)."""
    made: list[tuple[str, int, Job]] = [
        (f"matmuls in {dtype}", -1, functools.partial(machine.matmuls, dtype=dtype)) for dtype in DTYPES
    ]
    made += [(what, -1, job) for what, job in (*machine.JOBS.items(), ("collectives under compute", background.hidden))]
    for level, groups in network.groups(sizes).items():
        made += [
            (f"{which} on {group.members}", level, functools.partial(network.collectives, kind=which, group=group))
            for group in groups
            for which in network.KINDS
        ]
    return made


def fitted(base: Cluster, sizes: tuple[int, int], samples: Sequence[tuple[int, Sample]], date: str = "") -> Calibration:
    """The cluster that explains `samples` (level or -1, sample) best; `date` (today) goes into the sources."""
    kind, ranks, date = base.device.kind, math.prod(sizes), date or datetime.date.today().isoformat()
    how = f"gloo, {ranks} ranks of 1 thread on {cores_here()} cores" if kind == "cpu" else f"NCCL, {ranks} GPUs"
    source = f"measured {date}, torch {torch.__version__}, {how}"
    device, fits = fit_device.device(base.device, [sample for level, sample in samples if level < 0], ranks)
    memory = _memory(device, sizes)
    whose = "an equal part of the machine's for each rank" if kind == "cpu" else "that of the first GPU"
    sources = {**device.sources, **_sources(source, fits, base.device, device)}
    sources |= dict.fromkeys(memory, f"{source}: {whose}")
    device = dataclasses.replace(device, **memory, sources=sources)
    levels = []
    for index, (level, size) in enumerate(zip(base.levels, sizes, strict=True)):
        mine = [sample for at, sample in samples if at == index]
        made, more = fit_level.level(
            dataclasses.replace(level, size=size), mine, fit_level.limit_bytes_s(device, level), source
        )
        levels.append(made)
        fits = Fits(fits.found + more.found, fits.rejected + more.rejected, fits.impossible + more.impossible)
    return Calibration(
        Cluster(f"{base.name}-measured", tuple(levels), device), fits, tuple(sample for _, sample in samples)
    )


def _sources(source: str, fits: Fits, before: Device, after: Device) -> dict[str, str]:
    """Where each number of the device that has changed comes from."""
    changed = [
        f.name
        for f in dataclasses.fields(Device)
        if f.name != "sources" and getattr(before, f.name) != getattr(after, f.name)
    ]
    found = {}
    for name in changed:
        mine = [fit for fit in fits.found if fit.name.split(".")[0].split()[0] in (name, ALIAS.get(name, name))]
        about = ", ".join(dict.fromkeys(fit.about for fit in mine))
        quality = "; ".join(f"{fit.name.partition('.')[2]} {fit.quality}".strip() for fit in mine)
        found[name] = f"{source}: {about}; {quality}" if mine else f"{source}: with the others"
    return found


ALIAS = {
    "cache_bytes": "memory_bandwidth_bytes_s",
    "cache_bandwidth_bytes_s": "memory_bandwidth_bytes_s",
    "achievable_bandwidth": "memory_bandwidth_bytes_s",
    "tile": "peak_flops",
    "achievable": "achievable_of",
}
"""Constants that are fitted together with another one."""


def _memory(device: Device, sizes: tuple[int, int]) -> dict[str, Any]:
    if device.kind == "cuda":
        return {"memory_bytes": torch.cuda.get_device_properties(0).total_memory} if torch.cuda.is_available() else {}
    return {"memory_bytes": machine_bytes() // sizes[1]}


def _local() -> tuple[int, int]:
    """(nodes, ranks on each) of the process group."""
    world = dist.get_world_size()
    local = torchrun.local_ranks() or world
    if world % local:
        raise ClusterError(f"WORLD_SIZE {world} is not a multiple of LOCAL_WORLD_SIZE {local}")
    return world // local, local


def _here(job: Job, clock: Clock) -> list[Sample]:
    return job(clock)
