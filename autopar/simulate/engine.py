"""The event engine: tasks on streams, what they wait for, and what they share.

A stream runs its tasks one after the other, in the order in which they are given. A task begins when its stream is free
and all that it waits for has ended. Running tasks slow each other down where they share something:

    links   each task takes a share of its links (all of it, if nothing else is said); where the tasks on a link want
            more than its `capacity` (1 if nothing else is said), all of them are slower by the same factor. A task that
            needs several is as fast as the fullest one lets it be
    units   tasks that take a share of a device's compute units leave the rest to the task that computes on it

The engine does not know what tasks stand for. The end is never before the longest chain of tasks that wait for each
other; and never after the sum of all tasks, if tasks that compute need no links. Without shared links and units, making
a task longer never makes the end earlier. With them it may (Graham's anomaly): a task that comes later leaves a link to
another one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import PlanError


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `work_s` are its seconds if it shares nothing with others; `after` are the positions of tasks that must
    have ended before it begins.

    `uses` are the shares of its `links` that it takes when nothing slows it (empty: all of each). `units` names the
    device whose compute units it uses: the share `takes` of them, or with 0 what the others leave (it is the one that
    computes).
    """

    name: str
    stream: str
    work_s: float
    after: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    units: str = ""
    takes: float = 0.0
    uses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each task began and ended, in seconds from the start."""

    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]

    @property
    def length_s(self) -> float:
        """When the last task has ended."""
        return max(self.end_s, default=0.0)


def run(tasks: Sequence[Task], capacity: Mapping[str, float] | None = None) -> Timeline:
    """When each task runs. `capacity`: the capacity of links for which it is not 1. Raises PlanError where tasks wait
    for each other in a cycle."""
    state = _State(tasks, capacity or {})
    while state.step():
        pass
    if state.left:
        stuck = [t.name for t, end in zip(tasks, state.end_s, strict=True) if math.isnan(end)]
        raise PlanError(
            f"{state.left} of {len(tasks)} tasks wait for each other: {', '.join(stuck[:4])}, ...; the order of a "
            "stream contradicts what its tasks wait for"
        )
    return Timeline(tuple(state.begin_s), tuple(state.end_s))


@dataclass(eq=False)
class _State:
    """The state of a simulation at time `now_s`: which tasks have ended, run and wait."""

    tasks: Sequence[Task]
    capacity: Mapping[str, float]
    now_s: float = 0.0
    alone: list[tuple[float, int]] = field(default_factory=list)  # tasks that share nothing: a heap of (end, position)
    sharing: dict[int, float] = field(default_factory=dict)  # the others that run: seconds of work left
    rates: dict[int, float] = field(default_factory=dict)  # of `sharing`

    def __post_init__(self) -> None:
        count = len(self.tasks)
        self.left, self.begin_s, self.end_s = count, [math.nan] * count, [math.nan] * count
        self.waits = [len(task.after) for task in self.tasks]
        self.next: list[list[int]] = [[] for _ in self.tasks]
        self.streams: dict[str, deque[int]] = {}
        self.idle = dict.fromkeys((task.stream for task in self.tasks), True)
        for index, task in enumerate(self.tasks):
            self.streams.setdefault(task.stream, deque()).append(index)
            for before in task.after:
                self.next[before].append(index)
        self._start(list(self.streams))

    def step(self) -> bool:
        """Advance to the next end of a task; False where nothing runs."""
        first = min(
            self.sharing, key=lambda i: self.sharing[i] / self.rates[i] if self.rates[i] else math.inf, default=None
        )
        ends = (
            self.now_s + self.sharing[first] / self.rates[first]
            if first is not None and self.rates[first]
            else math.inf
        )
        if self.alone and self.alone[0][0] <= ends:
            until, first = heapq.heappop(self.alone)
        elif first is not None and ends < math.inf:
            until = ends
        else:
            return False
        for index in self.sharing:
            self.sharing[index] = max(0.0, self.sharing[index] - self.rates[index] * (until - self.now_s))
        self.now_s = until
        self._end(first)
        return True

    def _end(self, index: int) -> None:
        """End task number `index`."""
        self.end_s[index] = self.now_s
        self.left -= 1
        stream = self.tasks[index].stream
        self.idle[stream] = True
        touched = {stream: None}
        for later in self.next[index]:
            self.waits[later] -= 1
            touched[self.tasks[later].stream] = None
        shared = self.sharing.pop(index, None) is not None
        if self._start(list(touched)) or shared:
            self._share()

    def _start(self, streams: Sequence[str]) -> bool:
        """Start the tasks that can start on `streams`. Returns whether a task that shares links or units was
        started."""
        found = False
        for stream in streams:
            queue = self.streams[stream]
            if not self.idle[stream] or not queue or self.waits[queue[0]]:
                continue
            index = queue.popleft()
            task = self.tasks[index]
            self.idle[stream], self.begin_s[index] = False, self.now_s
            if task.links or task.units:
                self.sharing[index] = task.work_s
                found = True
            else:
                heapq.heappush(self.alone, (self.now_s + task.work_s, index))
        if found:
            self._share()
        return found

    def _share(self) -> None:
        """Set `rates`: for each running task that shares something, seconds of work per second."""
        on: dict[str, float] = {}
        taken: dict[str, float] = {}
        for index in self.sharing:
            task = self.tasks[index]
            for link, use in zip(task.links, task.uses or (1.0,) * len(task.links), strict=True):
                on[link] = on.get(link, 0.0) + use
            taken[task.units] = taken.get(task.units, 0.0) + task.takes
        self.rates = {}
        for index in self.sharing:
            task = self.tasks[index]
            free = 1.0 if task.takes or not task.units else max(0.0, 1.0 - taken[task.units])
            self.rates[index] = free / max((1.0, *(on[link] / self.capacity.get(link, 1.0) for link in task.links)))
