"""How long one run of something takes while all ranks do the same at the same time, as in a training step.

On a CPU whose ranks outnumber its cores, a short run is either not interrupted at all or by far longer than itself: what counts is how many
runs end within a window that is long against the slices of the scheduler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Clock:
    """`window_s` is how long something is repeated, `repeats` how often that is done; the median counts. `kind`: "cpu" or "cuda"."""

    kind: str
    window_s: float = 0.06
    repeats: int = 4

    def apart_s(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` that talks to nobody: the median over windows, then the mean over ranks."""
        run()
        mean = torch.tensor([statistics.median(self._window(run) for _ in range(self.repeats))], dtype=torch.float64, device=self.kind)
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def alone_s(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` on the first rank while all others wait; told to all."""
        run()
        mine = [self._window(run) if dist.get_rank() == 0 else self._idle() for _ in range(self.repeats)]
        told = torch.tensor([statistics.median(mine)], dtype=torch.float64, device=self.kind)
        self._meet()
        dist.broadcast(told, 0)
        return float(told)

    def _idle(self) -> float:
        self._meet()
        time.sleep(self.window_s)
        return 0.0

    def together_s(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` in which ranks wait for each other: as many on all, the slowest rank counts."""
        run()
        count = 2
        count = max(2, min(1000, int(self.window_s / max(self._runs(run, count), 1e-7))))
        return statistics.median(self._runs(run, count) for _ in range(self.repeats))

    def _window(self, run: Callable[[], object]) -> float:
        self._meet()
        begin, count, until = time.perf_counter(), 0, 0.0
        while until < self.window_s:
            run()
            count += 1
            if self.kind == "cpu" or count % 16 == 0:  # a GPU must not be asked for more than it does meanwhile
                self._done()
                until = time.perf_counter() - begin
        return until / count

    def _runs(self, run: Callable[[], object], count: int) -> float:
        self._meet()
        begin = time.perf_counter()
        for _ in range(count):
            run()
        self._done()
        slowest = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64, device=self.kind)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _meet(self) -> None:
        self._done()
        dist.barrier()

    def _done(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()
