"""What a piece of a program does in one pass over it, and how long that takes with collectives behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.pipeline.once_per_step import Sums
from autopar.problem.hiding import Load, Loads, merged, split, together_s

FORWARD, BACKWARD, INPUTS, WEIGHTS, BOTH = PASSES = range(5)


@dataclass(eq=False)
class Pass:
    """What one piece does in one pass: a block with all its instances. `ahead` is begun in the background with the block, `behind` on the way
    through it; `after` is what runs when the rest is done, and then what takes `adding_s`. The background begins late by the share that `lag_s` is of it."""

    compute_s: float = 0.0
    adding_s: float = 0.0
    lag_s: float = 0.0
    waited: Loads = field(default_factory=Loads)
    ahead: Loads = field(default_factory=Loads)
    behind: Loads = field(default_factory=Loads)
    after: Loads = field(default_factory=Loads)

    def wait(self, loads: Sequence[Load], factor: float) -> None:
        """Collectives that compute waits for."""
        self.waited.add(loads, factor)

    def hide(self, loads: Sequence[Load], factor: float, last: float = 0.0) -> None:
        """A way whose collectives run in the background (`hiding.split`); of the share `last` all but the first when the rest is done."""
        waited, behind = split(loads)
        self.waited.add(waited, factor)
        for number, load in enumerate(behind):
            late = last if number else 0.0
            self.after.add([load], factor * late)
            (self.ahead if load.kind == "all_gather" else self.behind).add([load], factor * (1.0 - late))

    @property
    def background_s(self) -> float:
        """Seconds of all that may hide."""
        return self.ahead.all_s + self.behind.all_s

    @property
    def work_s(self) -> float:
        """Seconds of all that is not in the background."""
        return self.compute_s + self.waited.all_s + self.after.all_s + self.adding_s

    def add(self, other: Pass) -> None:
        """More of the same."""
        self.compute_s += other.compute_s
        self.adding_s += other.adding_s
        self.lag_s += other.lag_s
        self.waited.merge(other.waited)
        self.ahead.merge(other.ahead)
        self.behind.merge(other.behind)
        self.after.merge(other.after)


@dataclass(eq=False)
class Did:
    """What a piece does in each of the passes, and collectives once per step; sums of gradients, once per step or after `each` microbatch, also one by one."""

    passes: tuple[Pass, ...] = field(default_factory=lambda: tuple(Pass() for _ in PASSES))
    once: Loads = field(default_factory=Loads)
    sums: list[Sums] = field(default_factory=list)
    each: list[Sums] = field(default_factory=list)


def shows(total: Pass, contention: float, shared: bool) -> float:
    """The share of the collectives behind a pass of a scope by which it takes longer."""
    return 1.0 if shared else shown_s(total, contention) / (total.background_s or 1.0)


def least_s(total: Pass, contention: float) -> float:
    """Seconds of a pass over a scope where all that may hide hides under all of it."""
    hidden = Pass()
    hidden.add(total)
    hidden.after, hidden.lag_s = Loads(), 0.0
    hidden.behind.add(total.after.moving())
    return hidden.work_s + total.after.local_s + shown_s(hidden, contention)


def shown_s(total: Pass, contention: float) -> float:
    """Seconds by which the collectives behind a pass of a scope make it longer."""
    if not total.background_s:
        return 0.0
    compute_s, under = total.compute_s + total.waited.local_s, 1.0 - total.lag_s / total.background_s  # no sum begins before a bucket is full
    waited = [load.times(under) for load in total.waited.moving()]
    took_s = together_s(under * compute_s, waited, merged([*total.ahead.moving(), *total.behind.moving()]), contention)
    return took_s - under * (compute_s + total.waited.moving_s)
