"""How long one run of something takes while all ranks do the same at the same time, as in a training step.

On a CPU whose ranks outnumber its cores, a short run is either not interrupted at all or by far longer than itself:
what counts is how many runs end within a window that is long against the slices of the scheduler. A step is longer than
all windows together and has its share of whatever comes between, so means count, not medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures functions on all ranks at once. Each is repeated for windows of `window_s` seconds; the mean over
    `repeats` windows counts. `kind`: "cpu" or "cuda".

    With `cores`, seconds are not of wall time, but the CPU seconds of all ranks divided by that number of cores: what a
    function would take on a machine without other work and without waiting, though it is measured beside other work.
    """

    kind: str
    window_s: float = 0.06
    repeats: int = 4
    cores: int = 0

    def apart_s(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` that does not communicate: the mean over windows and ranks."""
        run()
        mean = torch.tensor(
            [statistics.fmean(self._window(run) for _ in range(self.repeats))], dtype=torch.float64, device=self.kind
        )
        dist.all_reduce(mean)
        return float(mean) / (self.cores or dist.get_world_size())

    def alone_s(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` on the first rank while all others wait; the same number on all ranks."""
        run()
        mine = [self._window(run) if dist.get_rank() == 0 else self._idle() for _ in range(self.repeats)]
        told = torch.tensor([statistics.fmean(mine)], dtype=torch.float64, device=self.kind)
        self._meet()
        dist.broadcast(told, 0)
        return float(told)

    def _idle(self) -> float:
        """Wait for about a window, in step with ranks that measure."""
        self._meet()
        time.sleep(self.window_s)
        return 0.0

    def together_s(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` in which ranks wait for each other, on the slowest rank. All ranks do the same number of
        runs."""
        run()
        count = 2
        count = max(2, min(1000, int(self.window_s / max(self.runs_s(run, count), 1e-7))))
        return statistics.fmean(self.runs_s(run, count) for _ in range(self.repeats))

    def between_s(self, run: Callable[[], Result], use: Callable[[Result], object]) -> float:
        """Seconds of one `run` in which ranks wait for each other, between computations as in a step: the time of `run`
        followed by `use` of its result, less the time of `use` on a result that is there already."""
        found, count = run(), 2
        count = max(2, min(1000, int(self.window_s / max(self.runs_s(lambda: use(run()), count), 1e-7))))
        return statistics.fmean(
            self.runs_s(lambda: use(run()), count) - self.runs_s(lambda: use(found), count) for _ in range(self.repeats)
        )

    def _window(self, run: Callable[[], object]) -> float:
        """Seconds of one `run` on this rank, the mean over one window."""
        self._meet()
        begin, count, until = self._now(), 0, 0.0
        while until < self.window_s:
            run()
            count += 1
            if self.kind == "cpu" or count % 16 == 0:  # a GPU must not be asked for more than it does meanwhile
                self._done()
                until = self._now() - begin
        return until / count

    def runs_s(self, run: Callable[[], object], count: int = 1) -> float:
        """Seconds of one of `count` runs in a row on the slowest rank, or of all ranks over the cores."""
        self._meet()
        begin = self._now()
        for _ in range(count):
            run()
        self._done()
        took = torch.tensor([(self._now() - begin) / count], dtype=torch.float64, device=self.kind)
        dist.all_reduce(took, dist.ReduceOp.SUM if self.cores else dist.ReduceOp.MAX)
        return float(took) / (self.cores or 1)

    def _now(self) -> float:
        """Seconds of the clock in use; those of a process are of all its threads."""
        return time.process_time() if self.cores else time.perf_counter()

    def _meet(self) -> None:
        """Wait for all ranks."""
        self._done()
        dist.barrier()

    def _done(self) -> None:
        """Wait for the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
