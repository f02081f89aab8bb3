"""The compute and collectives of a piece of a program in one pass, and the seconds of collectives that are exposed.

A *piece* is an operator outside of blocks, or all instances of a run of blocks (pipeline.units). The passes are listed
in pipeline.passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.pipeline.once_per_step import Sums
from autopar.problem.hiding import Load, Loads, merged, split, together_s

FORWARD, BACKWARD, INPUTS, WEIGHTS, BOTH = PASSES = range(5)
"""The passes of a microbatch, as indices (pipeline.passes)."""


@dataclass(eq=False)
class Pass:
    """The work of one piece in one pass; of a run of blocks, that of all blocks.

    compute_s    seconds of compute
    waited       collectives that compute waits for, and local copies
    in_order     those of them that bring the first weights and take away their gradients: what they overlap depends on
                 what is in the stage, and is found in program order (stops.Stop has them as well)
    ahead        gathers in the background, prefetched: they begin with the block before
    behind       other collectives in the background: scatters and sums of gradients
    after        collectives after the last compute, all of which are exposed
    adding_s     seconds of adding gradients to those of earlier microbatches, after that
    lag_s        a part of the background's seconds: as the first buckets must be filled before sums begin, the
                 background overlaps only the share 1 - lag_s / background_s of the work
    """

    compute_s: float = 0.0
    adding_s: float = 0.0
    lag_s: float = 0.0
    waited: Loads = field(default_factory=Loads)
    in_order: Loads = field(default_factory=Loads)
    ahead: Loads = field(default_factory=Loads)
    behind: Loads = field(default_factory=Loads)
    after: Loads = field(default_factory=Loads)

    def wait(self, loads: Sequence[Load], factor: float) -> None:
        """Add collectives that compute waits for, `factor` times."""
        self.waited.add(loads, factor)

    def hide(self, loads: Sequence[Load], factor: float, last: float = 0.0) -> None:
        """Add the collectives of one chain that run in the background, and their local copies, which compute waits for
        (`hiding.split`), `factor` times. Of the second and later collectives the share `last` runs after the last
        compute."""
        copies, collectives = split(loads)
        self.waited.add(copies, factor)
        for number, load in enumerate(collectives):
            exposed = last if number else 0.0
            self.after.add([load], factor * exposed)
            (self.ahead if load.kind == "all_gather" else self.behind).add([load], factor * (1.0 - exposed))

    @property
    def background_s(self) -> float:
        """Seconds of the collectives in the background, exposed or not."""
        return self.ahead.all_s + self.behind.all_s

    @property
    def work_s(self) -> float:
        """Seconds of all that is not in the background, one after the other."""
        return self.compute_s + self.waited.all_s + self.after.all_s + self.adding_s

    def add(self, other: Pass) -> None:
        """Add the same pass over another piece."""
        self.compute_s += other.compute_s
        self.adding_s += other.adding_s
        self.lag_s += other.lag_s
        self.waited.merge(other.waited)
        self.in_order.merge(other.in_order)
        self.ahead.merge(other.ahead)
        self.behind.merge(other.behind)
        self.after.merge(other.after)


@dataclass(eq=False)
class Did:
    """The work of a piece in each of `passes`, and its collectives once per step.

    `leaves` gather leaves, `summed` sum gradients. `sums` and `each` are its sums of gradients one by one: once per
    step, and after each microbatch. They are also part of `summed` and of the passes.
    """

    passes: tuple[Pass, ...] = field(default_factory=lambda: tuple(Pass() for _ in PASSES))
    leaves: Loads = field(default_factory=Loads)
    summed: Loads = field(default_factory=Loads)
    sums: list[Sums] = field(default_factory=list)
    each: list[Sums] = field(default_factory=list)

    def leaves_s(self, contention: float) -> float:
        """Seconds of the collectives once per step that gather leaves."""
        return _in_buckets_s(self.leaves, contention)

    def summed_s(self, contention: float) -> float:
        """Seconds of those that sum gradients, with nothing beside them."""
        return _in_buckets_s(self.summed, contention)

    @property
    def copies_s(self) -> float:
        """Seconds of the copies around these."""
        return self.summed.local_s


def _in_buckets_s(loads: Loads, contention: float) -> float:
    """Seconds of collectives of buckets with nothing beside them. Copies around one bucket overlap the collectives of
    others, which take the share `contention` of the compute units."""
    return loads.all_s - (1.0 - contention) * min(loads.local_s, loads.moving_s)


def exposed_share(total: Pass, contention: float) -> float:
    """The share of a pass's background collectives that is exposed."""
    return shown_s(total, contention) / (total.background_s or 1.0)


def least_s(total: Pass, contention: float) -> float:
    """A lower bound of the seconds of a pass: with all of its collectives but those that compute always waits for
    overlapped by all of its work."""
    overlapped = Pass()
    overlapped.add(total)
    overlapped.after, overlapped.lag_s = Loads(), 0.0
    overlapped.behind.add([*total.after.moving(), *total.in_order.moving()])
    overlapped.waited.add(total.in_order.moving(), -1.0)
    return overlapped.work_s + total.after.local_s + shown_s(overlapped, contention)


def shown_s(total: Pass, contention: float) -> float:
    """Exposed seconds of the background collectives of a pass: by how much they make it longer than its work,
    slowed-down compute included (hiding.together_s)."""
    if not total.background_s:
        return 0.0
    compute_s, overlapping = total.compute_s + total.waited.local_s, 1.0 - total.lag_s / total.background_s
    waited = [load.times(overlapping) for load in total.waited.moving()]
    took_s = together_s(
        overlapping * compute_s, waited, merged([*total.ahead.moving(), *total.behind.moving()]), contention
    )
    return took_s - overlapping * (compute_s + total.waited.moving_s)
