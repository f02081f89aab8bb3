"""The makespan of a pipeline schedule: the dependencies between its actions, found once, and the time when each place
is done for given times of its stages.

A place runs its actions in the schedule's order, each as soon as its operands are there. It sends the result of an
action when that has ended, while it computes on; a place sends one tensor at a time, in both directions together. The
sums of gradients once per step begin with the last action of each stage, and run beside the others, which they slow
down (pipeline.summing): a place is done when its actions, and the copies around sums, and its sums are. So do gathers
of leaves with the first forward of the stage before theirs (pipeline.gathering).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.errors import PlanError
from autopar.pipeline.orders import Action, StageTime
from autopar.pipeline.summing import most_slower_s, slower_all_s, slower_s

KINDS = "FBIW"
"""Kinds of actions (orders.Action.kind): forward, whole backward, its parts for inputs and for weights."""
FORWARD, WHOLE, INPUTS, WEIGHTS = range(4)  # indices of KINDS
AT_ONCE = 512
"""Sets of times that are evaluated side by side: with more of them the arrays leave the cache."""


class Step(NamedTuple):
    """One action of one microbatch: its place, its stage, and its kind as an index of KINDS. `hop`: it sends its result
    between stages `hop` and `hop` + 1, in either direction (-1: nothing is sent). `here` and `sent`: positions in
    Flow.steps of the actions on its own place that it waits for, and of those on other places whose results have to
    arrive. `first`: it is the first forward of its stage, `next` the stage that is the next one of its place to begin
    (-1: none); `last`: it completes the gradients of its stage; `beside`: sums of another stage of its place have
    begun."""

    place: int
    stage: int
    kind: int
    hop: int
    here: tuple[int, ...]
    sent: tuple[int, ...]
    first: bool = False
    last: bool = False
    beside: bool = False
    next: int = -1


@dataclass(frozen=True, eq=False)
class Flow:
    """All actions of a schedule in topological order: each comes after those that it waits for. `places`: their
    number."""

    places: int
    steps: list[Step]

    @staticmethod
    def of(lines: Sequence[Sequence[Action]], places: Sequence[int]) -> Flow:
        """From the actions of each place in order (`lines`), where stage i is on `places[i]`. Raises PlanError where
        the order is a deadlock."""
        waits = _Waits(lines, places)
        steps: list[Step] = []
        at, begun = [0] * len(lines), set[int]()
        moved = True
        while moved:
            moved = False
            for place, line in enumerate(lines):
                while at[place] < len(line):
                    action, stage, micro = line[at[place]]
                    kind = KINDS.index(action)
                    needs = waits.of(kind, stage, micro)
                    if needs is None:
                        break
                    waits.done(kind, stage, micro, len(steps))
                    first = kind == FORWARD and stage not in begun
                    begun.add(stage)
                    steps.append(Step(place, stage, kind, waits.hop(kind, stage), *needs, first))
                    at[place] += 1
                    moved = True
        if len(steps) < sum(map(len, lines)):
            raise PlanError(
                "the schedule waits for itself: "
                f"{[line[i] for line, i in zip(lines, at, strict=True) if i < len(line)]}"
            )
        completing = {step.stage: index for index, step in enumerate(steps) if step.kind in (WHOLE, WEIGHTS)}
        summed = [min(index for index in completing.values() if steps[index].place == p) for p in range(len(lines))]
        later = {index for index, step in enumerate(steps) if index > summed[step.place]}
        for index in {*completing.values(), *later}:
            steps[index] = steps[index]._replace(last=index in completing.values(), beside=index in later)
        before = [-1] * len(lines)  # the first forward of a stage of each place that was the last one to begin
        for index, step in enumerate(steps):
            if step.first and before[step.place] >= 0:
                steps[before[step.place]] = steps[before[step.place]]._replace(next=step.stage)
            before[step.place] = index if step.first else before[step.place]
        return Flow(len(lines), steps)

    @cached_property
    def opening(self) -> list[int]:
        """The stage of each place that is the first one to begin."""
        first = {step.place: step.stage for step in reversed(self.steps) if step.first}
        return [first[place] for place in range(self.places)]

    def ends_s(self, times: Sequence[StageTime]) -> list[float]:
        """Seconds until each place is done, where stage i takes `times[i]`."""
        took = [[time.of(kind) for kind in KINDS] for time in times]
        clock, free = [0.0] * self.places, [0.0] * self.places  # when each place, and its link, is free
        summed, late = [0.0] * self.places, [0.0] * self.places  # when its sums are done; seconds after its actions
        contention = max(time.summing.contention for time in times)
        share = max(time.gathering.contention for time in times)
        gathered = [times[stage].gathering.ahead_s for stage in self.opening]  # when the leaves of its next stage are
        arrived: list[float] = []
        for place, stage, kind, hop, _, sent, first, last, beside, coming in self.steps:
            end = clock[place]  # by then all that it waits for on its own place has ended
            for index in sent:
                if arrived[index] > end:
                    end = arrived[index]
            if gathered[place] > end:
                end = gathered[place] if first else end + slower_s(took[stage][kind], gathered[place] - end, share)
            if beside and summed[place] > end:
                end += slower_s(took[stage][kind], summed[place] - end, contention)
            clock[place] = end = end + took[stage][kind] + (times[stage].gathering.longer_s if first else 0.0)
            if coming >= 0 and (ahead_s := times[coming].gathering.ahead_s):
                block_s = times[stage].gathering.block_s
                gathered[place] = end - block_s + ahead_s
                clock[place] = end = end + slower_s(block_s, ahead_s, share)
            if last:
                own = times[stage].summing
                left_s = own.left_s if kind == WHOLE and not stage else own.whole_s
                clock[place] = end = end + contention * (own.whole_s - left_s)
                summed[place] = max(end + left_s, summed[place] + own.whole_s)
                late[place] += own.late_s
            if hop >= 0 and times[hop].send_s:
                free[place] = end = max(free[place], end) + times[hop].send_s
            arrived.append(end)
        return [max(end + more, sums) for end, more, sums in zip(clock, late, summed, strict=True)]

    def ends_all_s(self, times_s: np.ndarray) -> np.ndarray:
        """`ends_s` for many sets of times at once, [places, sets]; `times_s` [`numbers`, stages, sets] are theirs."""
        starts = range(0, times_s.shape[2], AT_ONCE)
        return np.concatenate([self._ends_all_s(times_s[..., start : start + AT_ONCE]) for start in starts], axis=1)

    def _ends_all_s(self, times_s: np.ndarray) -> np.ndarray:
        """[places, sets]: `ends_all_s` of so few sets that the arrays stay in the cache."""
        took_s, (send_s, whole_s, left_s, late_s, shares, *leaves) = times_s[: len(KINDS)], times_s[len(KINDS) :]
        longer_s, ahead_s, block_s, gather_shares = leaves
        contention, share = float(shares.max(initial=0.0)), float(gather_shares.max(initial=0.0))
        most_s, most_gather_s = most_slower_s(took_s, contention), most_slower_s(took_s, share)
        ahead = (ahead_s.max(axis=1, initial=0.0) > 0.0).tolist()
        gathered = [ahead_s[stage] for stage in self.opening]
        busy = [ahead[stage] for stage in self.opening]  # whether leaves of its next stage may be on their way
        clock, free, summed, late = ([np.zeros(times_s.shape[2])] * self.places for _ in range(4))
        sends = (send_s.max(axis=1, initial=0.0) > 0.0).tolist()
        arrived: list[np.ndarray] = []
        for place, stage, kind, hop, _, sent, first, last, beside, coming in self.steps:
            end = clock[place]  # as in `ends_s`
            for index in sent:
                end = np.maximum(end, arrived[index])
            if busy[place] and first:
                end, busy[place] = np.maximum(end, gathered[place]), False
            elif busy[place]:
                end = end + slower_all_s(most_gather_s[kind, stage], gathered[place] - end, share)
            if beside and contention:
                end = end + slower_all_s(most_s[kind, stage], summed[place] - end, contention)
            end = end + took_s[kind, stage]
            clock[place] = end = end + longer_s[stage] if first else end
            if coming >= 0 and ahead[coming]:
                gathered[place], busy[place] = end - block_s[stage] + ahead_s[coming], True
                clock[place] = end = end + slower_all_s(most_slower_s(block_s[stage], share), ahead_s[coming], share)
            if last:
                after_s = left_s[stage] if kind == WHOLE and not stage else whole_s[stage]
                clock[place] = end = end + contention * (whole_s[stage] - after_s)
                summed[place] = np.maximum(end + after_s, summed[place] + whole_s[stage])
                late[place] = late[place] + late_s[stage]
            if hop >= 0 and sends[hop]:
                free[place] = end = np.maximum(free[place], end) + send_s[hop]
            arrived.append(end)
        return np.array([np.maximum(end + more, sums) for end, more, sums in zip(clock, late, summed, strict=True)])


def numbers(time: StageTime) -> tuple[float, ...]:
    """The times of a stage as a row of `Flow.ends_all_s`: of actions by kind, of a send, of sums, and of gathers."""
    sums, gathers = time.summing, time.gathering
    each_s = (time.of(kind) for kind in KINDS)
    leaves = gathers.longer_s, gathers.ahead_s, gathers.block_s, gathers.contention
    return (*each_s, time.send_s, sums.whole_s, sums.left_s, sums.late_s, sums.contention, *leaves)


_Needs = tuple[tuple[int, ...], tuple[int, ...]]


class _Waits:
    """The actions that are done, as positions in Flow.steps by kind, stage and microbatch (-1: not yet). Lists, not
    dicts: a schedule may have hundreds of thousands."""

    def __init__(self, lines: Sequence[Sequence[Action]], places: Sequence[int]) -> None:
        micro = 1 + max(action.microbatch for line in lines for action in line)
        self._at = [[[-1] * micro for _ in places] for _ in KINDS]
        self._last = len(places) - 1
        # whether the next stage is on another place
        self._hops = [i < self._last and places[i] != places[i + 1] for i in range(len(places))]

    def done(self, kind: int, stage: int, micro: int, position: int) -> None:
        """Record an action. The gradient of inputs, of a backward that is split in two, is what others wait for, so it
        counts as a whole backward."""
        self._at[WHOLE if kind == INPUTS else kind][stage][micro] = position

    def hop(self, kind: int, stage: int) -> int:
        """The hop over which an action sends (Step.hop)."""
        back = stage - 1 if stage and kind in (WHOLE, INPUTS) else -1
        hop = stage if kind == FORWARD else back
        return hop if hop >= 0 and self._hops[hop] else -1

    def of(self, kind: int, stage: int, micro: int) -> _Needs | None:
        """The positions of what an action waits for, on its own place and on others; None while one of them is not
        done."""
        if kind == FORWARD:
            return self._arriving((), self._at[FORWARD][stage - 1][micro], stage - 1) if stage else ((), ())
        own = self._at[WHOLE if kind == WEIGHTS else FORWARD][stage][micro]
        if own < 0:
            return None
        if kind == WEIGHTS or stage == self._last:
            return (own,), ()
        return self._arriving((own,), self._at[WHOLE][stage + 1][micro], stage)

    def _arriving(self, own: tuple[int, ...], position: int, hop: int) -> _Needs | None:
        """`own`, and the result of the action at `position` over `hop`, which is on the same place where nothing is
        sent."""
        if position < 0:
            return None
        return (own, (position,)) if self._hops[hop] else ((*own, position), ())


def finishes_s(lines: Sequence[Sequence[Action]], times: Sequence[StageTime], places: Sequence[int]) -> list[float]:
    """Seconds until each place is done with the actions of `lines`, where stage i is on `places[i]`."""
    return Flow.of(lines, places).ends_s(times)


def step_s(lines: Sequence[Sequence[Action]], times: Sequence[StageTime], places: Sequence[int]) -> float:
    """Seconds until the last place is done."""
    return max(finishes_s(lines, times, places))
