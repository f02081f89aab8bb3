"""What a collective in the background takes of the compute over it. Runs on ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from autopar.calibrate.clock import Clock
from autopar.calibrate.cold_operands import Cold
from autopar.calibrate.network import Group
from autopar.calibrate.samples import Sample
from autopar.runtime.collectives import Later, start_all_gather, start_all_reduce

BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Of one collective: buckets of weights or gradients."""

EDGE = {"cpu": 512, "cuda": 4096}
"""Rows, columns and depth of the matmuls."""

LONGER = 2
"""The matmuls take so many times as long as the collective, so that it ends while they run."""

TURNS = 9
"""How often each case is measured."""

ALONE, OVER, BEHIND = "compute without", "compute over", "compute behind"
"""How samples begin; the collective follows."""


def hidden(clock: Clock) -> list[Sample]:
    """The time of matmuls without a collective, beside one that runs in the background, and after one: for an
    all-gather and an all-reduce over all ranks. Medians of TURNS."""
    kind, ranks = clock.kind, dist.get_world_size()
    if ranks < 2:
        return []
    mesh, cold, elements = Group(ranks, ranks).mesh, Cold(kind), BYTES[kind] // 4
    starts: dict[str, Callable[[], Later]] = {
        "all_gather": lambda: start_all_gather(cold.next(elements // ranks), 1, mesh),
        "all_reduce": lambda: start_all_reduce(cold.next(elements), 1, mesh),
    }
    return [
        Sample(f"{what} {which}", (BYTES[kind],), seconds, ranks)
        for which, start in starts.items()
        for what, seconds in _turns(clock, cold, start).items()
    ]


def _turns(clock: Clock, cold: Cold, start: Callable[[], Later]) -> dict[str, float]:
    """The seconds of the three cases (ALONE, OVER, BEHIND) for the collective that `start` begins."""

    def matmul() -> Tensor:
        edge = EDGE[clock.kind]
        return cold.keep(functional.linear(cold.next(edge, edge), cold.next(edge, edge)))

    def compute() -> None:
        for _ in range(count):
            matmul()

    def over() -> None:
        later = start()
        compute()
        cold.keep(later())

    def behind() -> None:
        cold.keep(start()())
        compute()

    waits_s, matmul_s = (clock.runs_s(run, TURNS) for run in (lambda: cold.keep(start()()), matmul))
    count = max(1, round(LONGER * waits_s / max(matmul_s, 1e-9)))
    runs: dict[str, Callable[[], None]] = {ALONE: compute, OVER: over, BEHIND: behind}
    took: dict[str, list[float]] = {what: [] for what in runs}
    for _ in range(TURNS):  # in turns: the machine may have other work for some of the time
        for what, run in runs.items():
            took[what].append(clock.runs_s(run, 2))
    return {what: statistics.median(seconds) for what, seconds in took.items()}
