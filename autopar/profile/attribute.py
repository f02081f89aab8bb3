"""From the events of torch.profiler to seconds by operator and by collective.

    forward     the range of an operator, less the steps of reshards inside
    backward    autograd's nodes carry the thread and the number of the forward operator that made them: the last one
                of that thread that began with that number (each thread counts for itself, and what is run again for the
                backward of a GPU runs in a thread of autograd)
    steps       ranges of the runtime (`runtime.profiler_ranges`), wherever they run
    optimizer   the range that torch puts around its step

On GPUs a range counts the seconds of the kernels that it started; the copy of the range that the profiler has among the
kernels does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd import DeviceType

from autopar.layout import LOCAL
from autopar.profile.label import OP
from autopar.runtime.profiler_ranges import PREFIX

Key = tuple[object, ...]
"""("op", node), (kind, axis, bytes), ("sync", kind, axis), ("local",) for slices and masks, ("optimizer",)."""

BACKWARD = "autograd::engine::evaluate_function: "
OPTIMIZER = "Optimizer.step#"


def attributed(events: Sequence[Any], *, cuda: bool = False) -> dict[Key, float]:
    """Seconds by key of all that ran in `events` (`torch.profiler.profile.events()`)."""
    ordered = sorted(
        (event for event in events if event.device_type == DeviceType.CPU),
        key=lambda event: (event.thread, event.time_range.start, -event.time_range.end),
    )
    return _Walk(cuda).over(ordered)


class _Walk:
    """Goes over the events of a thread in order, with the ranges that are open."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.found: dict[Key, float] = {}
        self.owner: dict[tuple[int, int], str] = {}  # forward operator by thread and autograd's number

    def over(self, events: Sequence[Any]) -> dict[Key, float]:
        """See `attributed`."""
        open_: list[tuple[Any, Key | None]] = []
        for event in events:
            while open_ and (
                event.thread != open_[-1][0].thread or event.time_range.start >= open_[-1][0].time_range.end
            ):
                open_.pop()
            key = self._key(event)
            if key is None:
                self._number(event, open_)
                continue
            outer = next((k for _, k in reversed(open_) if k is not None), None)
            seconds = self._seconds(event)
            if outer is None or outer[0] == "op":
                self._add(key, seconds)
                if outer is not None:
                    self._add(outer, -seconds)
            open_.append((event, key))
        return self.found

    def _add(self, key: Key, seconds: float) -> None:
        self.found[key] = self.found.get(key, 0.0) + seconds

    def _number(self, event: Any, open_: Sequence[tuple[Any, Key | None]]) -> None:
        """Note that a forward operator inside the range of a node may make the autograd node with its number."""
        if event.sequence_nr >= 0 and not event.fwd_thread:  # what has one is of the backward
            outer = next((k for _, k in reversed(open_) if k is not None), None)
            self.owner[event.thread, event.sequence_nr] = (
                str(outer[1]) if outer is not None and outer[0] == "op" else ""
            )

    def _key(self, event: Any) -> Key | None:
        """What an event stands for; None where it is a part of something else, or of nothing."""
        name: str = event.name
        if name.startswith(f"{OP} "):
            return "op", name.removeprefix(f"{OP} ")
        if name.startswith(f"{PREFIX} "):
            return _step(name.split()[1:])
        if name.startswith(OPTIMIZER):
            return ("optimizer",)
        if name.startswith(BACKWARD) and (owner := self.owner.get((event.fwd_thread, event.sequence_nr))):
            return "op", owner
        return None

    def _seconds(self, event: Any) -> float:
        return float(event.device_time_total if self.cuda else event.time_range.end - event.time_range.start) * 1e-6


def _step(words: Sequence[str]) -> Key:
    if words[0] == "sync":
        return "sync", words[1], int(words[2])
    return ("local",) if words[0] in LOCAL else (words[0], int(words[1]), int(words[2]))
