"""Timetables: a pipeline schedule with so many stages per place, and what it makes of a model cut evenly.

The rows are what the search tries. GPipe is none of them, because 1F1B takes as long with less memory; the looped
schedules that run all microbatches forward first neither, for the same reason. Recipes have them by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from autopar.pipeline import shared_cores
from autopar.pipeline.makespan import Flow
from autopar.pipeline.orders import Flying, StageTime, in_flight, orders
from autopar.pipeline.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule by name and how many stages each place has under it; None where that is to be chosen."""

    schedule: str
    virtual: int | None = 1

    def decided(self, places: int, microbatches: int, pieces: int) -> Iterator[Kind]:
        """It, or of a kind that leaves open how many stages each place has, one for each number of them that is worth it: `pieces` cannot be spread as evenly over
        fewer stages, and places wait so much less than with fewer stages that the step is shorter by WORTH."""
        if self.virtual is not None:
            yield self
            return
        waits = (places - 1) / (3 if SCHEDULES[self.schedule].splits_backward else 1)  # of one stage per place, in microbatches; v stages make it 1/v
        before = microbatches + waits
        even = {-(-pieces // (places * each)) for each in range(1, pieces // places + 1)}
        for virtual in sorted({2, *(n for n in even if n > 2)}):
            if (length := microbatches + waits / virtual) <= before * (1 - WORTH) or virtual == 2:
                before = length
                yield Kind(self.schedule, virtual)


SEARCHED = (Kind("1f1b"), Kind("interleaved_1f1b", None), Kind("interleaved_zero_bubble", None), Kind("zbv_zero_bubble", 2), Kind("dualpipev", 2))

WORTH = 0.02  # relative: more stages per place are tried where the step is shorter by so much
ROUNDS = 4  # after so many rounds of microbatches every pipeline is full


@dataclass(frozen=True)
class Timetable:
    """What `kind` does with `microbatches` on `places`. Raises PlanError, when it is asked what it keeps or how long it takes, where it
    cannot run them."""

    kind: Kind
    places: int
    microbatches: int

    @property
    def schedule(self) -> Schedule:
        """The schedule's own row."""
        return SCHEDULES[self.kind.schedule]

    @property
    def virtual(self) -> int:
        """How many stages each place has."""
        assert self.kind.virtual is not None, "a timetable is of a kind that leaves nothing open"
        return self.kind.virtual

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.places * self.virtual

    @property
    def at(self) -> list[int]:
        """The place of each stage."""
        return [self.schedule.place(stage, self.places) for stage in range(self.stages)]

    @cached_property
    def short(self) -> tuple[int, ...]:
        """The numbers of microbatches whose steps tell this one's: its own, or where they are many two smaller ones.

        Once a pipeline is full, every further round of `places` microbatches takes as long as the one before, and keeps no more:
        exact for even stages, within half a percent for uneven ones (tests/unit/joint/test_timetables.py, all schedules).
        """
        if self.microbatches <= (ROUNDS + 2) * self.places:
            return (self.microbatches,)
        first = ROUNDS * self.places + self.microbatches % self.places
        return first, first + self.places

    @cached_property
    def flying(self) -> list[Flying]:
        """For each stage the microbatches that it keeps when its place keeps most."""
        return in_flight(orders(self.kind.schedule, self.places, self.stages, self.short[-1]), self.stages)

    def ends_s(self, times: Sequence[StageTime], *, whole: bool = False, alone: float = 1.0) -> list[float]:
        """Seconds until each place is done with a step, for the times of each stage; `whole`: not told from short steps; `alone`: how many
        times as fast a place is when the others wait (Device.alone)."""
        counts = (self.microbatches,) if whole else self.short
        flows = [flow_of(self.kind, self.places, m) for m in counts]
        runs = [shared_cores.ends_s(flow, times, alone) if alone > 1 else flow.ends_s(times) for flow in flows]
        if len(runs) == 1:
            return runs[0]
        return [second + self._rounds * (second - first) for first, second in zip(*runs, strict=True)]

    def ends_all_s(self, took_s: np.ndarray, send_s: np.ndarray) -> np.ndarray:
        """The same for many ways at once, as Flow.ends_all_s has it."""
        first, *others = (flow_of(self.kind, self.places, m).ends_all_s(took_s, send_s) for m in self.short)
        return others[0] + self._rounds * (others[0] - first) if others else first

    @property
    def _rounds(self) -> float:
        """Rounds of microbatches that `short` leaves out."""
        return (self.microbatches - self.short[-1]) / self.places

    @property
    def actions(self) -> int:
        """How many actions tell how long it takes."""
        return sum(len(flow_of(self.kind, self.places, m).steps) for m in self.short)

    @cached_property
    def length(self) -> float:
        """The step's length where all stages together take 1 for one microbatch, each the same, a third of it forward."""
        third = 1 / (3 * self.stages)
        split = self.schedule.splits_backward
        even = StageTime(third, third if split else 2 * third, third if split else 0.0)
        return max(self.ends_s([even] * self.stages))

    @property
    def least_length(self) -> float:
        """The same, as short as it may be however long forward, backward and weights take: what is taken apart may fill all waits."""
        return self.microbatches / self.places if self.schedule.splits_backward else self.length

    @cached_property
    def kept(self) -> float:
        """How often the place that keeps most keeps what one microbatch of the whole model keeps, stages cut evenly."""
        return max(sum(n.kept for n, at in zip(self.flying, self.at, strict=True) if at == place) for place in range(self.places)) / self.stages


@lru_cache(maxsize=64)
def flow_of(kind: Kind, places: int, microbatches: int) -> Flow:
    """What waits for what under a kind of schedule."""
    table = Timetable(kind, places, microbatches)
    return Flow.of(orders(kind.schedule, places, table.stages, microbatches), table.at)


@lru_cache(maxsize=1024)
def timetable(kind: Kind, places: int, microbatches: int) -> Timetable:
    """The one Timetable of its arguments."""
    return Timetable(kind, places, microbatches)
