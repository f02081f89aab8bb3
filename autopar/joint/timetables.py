"""Timetables: a pipeline schedule with a number of stages per place, and the seconds and memory of a step under it.
Made by joint.pricing.

SEARCHED are the kinds that the search tries. Schedules that run all forwards first keep the activations of all
microbatches. They are tried because no forward waits for a backward to come back: where sends take time, GPipe is
faster than 1F1B, and looped BFS than interleaved 1F1B. Looped BFS has two stages per place: more of them send more, and
over links on which that costs nothing interleaved 1F1B is as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

from autopar.errors import PlanError
from autopar.pipeline import shared_cores
from autopar.pipeline.in_flight import InFlight
from autopar.pipeline.makespan import Flow
from autopar.pipeline.orders import Action, Flying, StageTime, in_flight, orders, short, telling
from autopar.pipeline.schedules import SCHEDULES, Schedule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule by name, and how many stages each place has (`virtual`; None where the search chooses it)."""

    schedule: str
    virtual: int | None = 1

    def decided(self, places: int, microbatches: int, pieces: int, *, finely: bool = False) -> Iterator[Kind]:
        """This kind; if it leaves `virtual` open, one kind for each number v of stages per place that is worth trying.
        `finely`: also numbers in between and above, each at least FINER times the one before.

        Two always are. More are if no fewer stages spread `pieces` as evenly, and if the step with its pipeline bubble,
        m + (p - 1) / v microbatches long (a third of the bubble where backwards are split), is shorter by WORTH_GAIN
        than with the last number tried.
        """
        if self.virtual is not None:
            yield self
            return
        # with one stage per place, in microbatches
        bubble = (places - 1) / (3 if SCHEDULES[self.schedule].splits_backward else 1)
        before = microbatches + bubble
        even = {-(-pieces // (places * each)) for each in range(1, pieces // places + 1)}
        worth = set(_finer(pieces // places) if finely else ())
        for virtual in sorted({2, *(n for n in even if n > 2)}):
            if (length := microbatches + bubble / virtual) <= before * (1 - WORTH_GAIN) or virtual == 2:
                before = length
                worth.add(virtual)
        for virtual in sorted(worth):
            yield Kind(self.schedule, virtual)


def _finer(most: int) -> Iterator[int]:
    """Numbers of stages per place from 2 to `most`."""
    virtual = 2
    while virtual <= most:
        yield virtual
        virtual = max(virtual + 1, math.ceil(virtual * FINER))


SEARCHED = (
    Kind("1f1b"),
    Kind("gpipe"),
    Kind("interleaved_1f1b", None),
    Kind("looped_bfs", 2),
    Kind("interleaved_zero_bubble", None),
    Kind("zbv_zero_bubble", 2),
    Kind("dualpipev", 2),
)

WORTH_GAIN = 0.02  # relative: more stages per place are tried where the step is shorter by so much
SENT = 0.1  # of the forward of a stage: how long a send takes by which it is found how many of them a step waits for
FINER = 1.25  # factor from each number of stages per place to the next, of those that the fastest result is tried with


@dataclass(frozen=True)
class Timetable:
    """`microbatches` under `kind` on `places`. Properties and methods that need the order of actions raise PlanError
    where the schedule cannot run them."""

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
        assert self.kind.virtual is not None, "Kind.decided chooses the number of stages before a timetable is made"
        return self.kind.virtual

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.places * self.virtual

    @cached_property
    def at(self) -> list[int]:
        """The place of each stage."""
        return [self.schedule.place(stage, self.places) for stage in range(self.stages)]

    @cached_property
    def short(self) -> tuple[int, ...]:
        """The numbers of microbatches that are simulated: its own, or two smaller ones from which the step is
        extrapolated."""
        return short(self.places, self.microbatches)

    @cached_property
    def flying(self) -> list[Flying]:
        """For each stage, the microbatches in flight at the moment at which its place keeps most activations, where all
        its stages keep alike."""
        return in_flight(self._orders, self.stages)

    @cached_property
    def in_flight(self) -> list[InFlight]:
        """For each place, the microbatches in flight at every moment at which it may be fullest."""
        return [InFlight.of(line, self.of_place(place, range(self.stages))) for place, line in enumerate(self._orders)]

    def of_place(self, place: int, by_stage: Iterable[T]) -> list[T]:
        """Of `by_stage` (one item per stage), the items of the stages of one place, in order."""
        return [each for each, at in zip(by_stage, self.at, strict=True) if at == place]

    @property
    def _orders(self) -> Sequence[Sequence[Action]]:
        """The actions of each place, of as many microbatches as fill the pipeline; where all forwards run first, of all
        microbatches, since every further one is kept as well. One place runs them one after the other, whatever the
        schedule."""
        schedule = "1f1b" if self.places == 1 else self.kind.schedule
        return orders(schedule, self.places, self.stages, telling(schedule, self.places, self.microbatches))

    def ends_s(self, times: Sequence[StageTime], *, whole: bool = False, alone: float = 1.0) -> list[float]:
        """Seconds until each place is done with a step, for the times of each stage. `whole`: simulate all microbatches
        instead of extrapolating from `short`. `alone`: how many times as fast a place is while the others wait
        (Device.alone)."""
        counts = (self.microbatches,) if whole else self.short
        flows = [flow_of(self.kind, self.places, m) for m in counts]
        runs = [shared_cores.ends_s(flow, times, alone) if alone > 1 else flow.ends_s(times) for flow in flows]
        if len(runs) == 1:
            return runs[0]
        return [second + self._rounds * (second - first) for first, second in zip(*runs, strict=True)]

    def ends_all_s(self, times_s: np.ndarray) -> np.ndarray:
        """[places, ways] the same for many ways at once, for times [numbers, stages, ways] as Flow.ends_all_s has
        them."""
        first, *others = (flow_of(self.kind, self.places, m).ends_all_s(times_s) for m in self.short)
        return others[0] + self._rounds * (others[0] - first) if others else first

    @property
    def _rounds(self) -> float:
        """Rounds of `places` microbatches beyond the longest step in `short`."""
        return (self.microbatches - self.short[-1]) / self.places

    @property
    def actions(self) -> int:
        """How many actions are simulated to time a step."""
        return sum(len(flow_of(self.kind, self.places, m).steps) for m in self.short)

    @cached_property
    def length(self) -> float:
        """The length of a step in units of one microbatch through all stages, which are even, with a third of the time
        in the forward; sends take none."""
        third = 1 / (3 * self.stages)
        split = self.schedule.splits_backward
        even = StageTime(third, third if split else 2 * third, third if split else 0.0)
        return max(self.ends_s([even] * self.stages))

    @cached_property
    def waits(self) -> float:
        """How many of its sends a step waits for, where stages are even and each send takes SENT of the forward of
        one."""
        third, sent_s = 1 / (3 * self.stages), SENT / (3 * self.stages)
        split = self.schedule.splits_backward
        even = StageTime(third, third if split else 2 * third, third if split else 0.0, sent_s)
        return (max(self.ends_s([even] * self.stages)) - self.length) / sent_s

    @property
    def least_length(self) -> float:
        """A lower bound of `length` for any ratio of forward, backward for inputs and for weights: split backwards may
        fill the whole bubble."""
        return self.microbatches / self.places if self.schedule.splits_backward else self.length

    @cached_property
    def kept(self) -> float:
        """Activations at the peak of the place that keeps most, in units of those of one microbatch of the whole model,
        with even stages."""
        return max(sum(n.kept for n in self.of_place(place, self.flying)) for place in range(self.places)) / self.stages


@lru_cache(maxsize=64)
def flow_of(kind: Kind, places: int, microbatches: int) -> Flow:
    """The actions of a schedule and their dependencies."""
    table = Timetable(kind, places, microbatches)
    return Flow.of(orders(kind.schedule, places, table.stages, microbatches), table.at)


@lru_cache(maxsize=1024)
def timetable(kind: Kind, places: int, microbatches: int) -> Timetable:
    """The Timetable of these arguments, made once."""
    return Timetable(kind, places, microbatches)


def runnable(kind: Kind, places: int, microbatches: int, pieces: int) -> Timetable | None:
    """The Timetable of these arguments for a model of so many `pieces`; None where it cannot run them."""
    table = timetable(kind, places, microbatches)
    if (places == 1 and (table.virtual > 1 or table.schedule.splits_backward)) or table.stages > pieces:
        return None
    try:
        return table if table.flying else None
    except PlanError:
        return None
