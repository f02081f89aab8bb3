"""When work in the background is waited for: reduce-scatters of whole gradients, and sums of them over replicas. It is
waited for late, so that compute hides it, but the bytes that it holds are bounded.

One rule, shared by what runs (runtime.gradsync), its simulation (simulate.rank) and its memory (memory.backward,
memory.buckets).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from autopar.buckets import SOON


class Deferred(Protocol):
    """Background work of one or more parts (collectives), one after the other; the current part is running."""

    @property
    def nbytes(self) -> float:
        """Bytes that are held until the current part is over."""

    @property
    def more(self) -> bool:
        """Whether a part follows the current one."""

    def go_on(self) -> bool:
        """Wait for the current part and begin the next one, if any; whether there is one."""

    def wait(self) -> None:
        """Wait for the current part and begin nothing more."""


Kind = TypeVar("Kind", bound=Deferred)

BUCKETS = 2
"""The most buckets of whole gradients that may wait for their scatter, in addition to those of the current block."""


class Queue(Generic[Kind]):
    """Background work, oldest first. Each entry belongs to a unit (a block); what the current unit has added is never
    waited for.

    An entry on its last part is waited for once more than `limit_bytes` were added behind it. A block's scatters can
    thus hide under the whole backward of the next one, and hardly more than one block's whole gradients are held.

    An entry with another part to begin goes on earlier: once the bytes behind it exceed both what its unit has added
    and the largest entry in front of it, and at least SOON * `limit_bytes`. Each part of a small block then has the
    time of one block, instead of all being left for the end of the backward. The next part joins the end of the queue,
    as work of the current unit.
    """

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.waiting: deque[tuple[Kind, _Unit]] = deque()
        self._unit = _Unit(None)

    def add(self, late: Kind, unit: Any) -> None:
        """Append one entry of `unit`, and let those go on that must not wait any longer."""
        if self._unit.of != unit:
            self._unit = _Unit(unit)
        self._unit.nbytes += late.nbytes
        self.waiting.append((late, self._unit))
        while (number := self._due()) >= 0:
            self._go_on(number)

    def drain(self) -> None:
        """Finish all entries, all their parts included."""
        while self.waiting:
            self._go_on(0)

    def drop(self) -> None:
        """Abandon all entries. Their current parts are still waited for: they are collectives, in which the other ranks
        take part."""
        while self.waiting:
            self.waiting.popleft()[0].wait()

    def _due(self) -> int:
        """The position of the oldest entry that must go on now; -1 where there is none."""
        if not self.waiting or self.waiting[0][1] is self._unit:
            return -1  # what the unit itself has added is not waited for, and nothing is older
        behind_bytes, largest_bytes = sum(late.nbytes for late, _ in self.waiting), 0.0
        for number, (late, unit) in enumerate(self.waiting):
            behind_bytes -= late.nbytes
            needed_bytes = (
                min(self.limit_bytes, max(SOON * self.limit_bytes, unit.nbytes, largest_bytes))
                if late.more
                else self.limit_bytes
            )
            if unit is not self._unit and behind_bytes > needed_bytes:
                return number
            largest_bytes = max(largest_bytes, late.nbytes)
        return -1

    def _go_on(self, number: int) -> None:
        """Let entry `number` begin its next part, at the end of the queue, or end it."""
        late, _ = self.waiting[number]
        del self.waiting[number]
        if late.go_on():
            self.waiting.append((late, self._unit))


@dataclass(eq=False, slots=True)
class _Unit:
    """A unit that adds entries: `of` names the block, `nbytes` are the bytes that it has added so far."""

    of: Any
    nbytes: float = 0.0
