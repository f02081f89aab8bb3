"""Work on its way in the background: whole gradients that are being scattered and sums of them, so many bytes at a time. One rule for what runs (runtime.gradsync), for the
simulation of it (simulate.rank) and for the memory that it takes (memory.backward, memory.buckets)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from autopar.layout import SOON


class Late(Protocol):
    """Work in parts, the first of which runs."""

    @property
    def nbytes(self) -> float:
        """Bytes that are there until the part that runs is over."""

    @property
    def more(self) -> bool:
        """Whether another part is yet to begin."""

    def go_on(self) -> bool:
        """Wait for that part and begin the next one, or end; whether there is more to do later."""

    def wait(self) -> None:
        """Wait for that part, and do no more."""


Kind = TypeVar("Kind", bound=Late)

BUCKETS = 2
"""So many buckets of whole gradients that are scattered may wait behind those of a block."""


class Queue(Generic[Kind]):
    """Late work, oldest first. What one unit adds goes on when a later one has added `limit_bytes` behind it: a block's scatters hide under all of
    its backward, and whole gradients of hardly more than one block are there. What has another part to begin goes on when as much is behind it as its unit has added and as the largest in
    front of it has, at least SOON of that limit: the parts of small blocks have a block's time each, and are not all left for the end. The other part then waits as if the later unit had
    added it."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.waiting: deque[tuple[Kind, _Unit]] = deque()
        self._unit = _Unit(None)

    def add(self, late: Kind, unit: Any) -> None:
        """One more, which belongs to `unit`; what must not wait any longer goes on."""
        if self._unit.of != unit:
            self._unit = _Unit(unit)
        self._unit.nbytes += late.nbytes
        self.waiting.append((late, self._unit))
        while (number := self._due()) >= 0:
            self._go_on(number)

    def drain(self) -> None:
        """Finish everything, part by part."""
        while self.waiting:
            self._go_on(0)

    def drop(self) -> None:
        """Nothing of it is wanted; what runs is waited for, since all ranks take part in it."""
        while self.waiting:
            self.waiting.popleft()[0].wait()

    def _due(self) -> int:
        """The oldest one that goes on now that another one has come; -1 for none."""
        behind_bytes, largest_bytes = sum(late.nbytes for late, _ in self.waiting), 0.0
        for number, (late, unit) in enumerate(self.waiting):
            behind_bytes -= late.nbytes
            needed_bytes = min(self.limit_bytes, max(SOON * self.limit_bytes, unit.nbytes, largest_bytes)) if late.more else self.limit_bytes
            if unit is not self._unit and behind_bytes > needed_bytes:
                return number
            largest_bytes = max(largest_bytes, late.nbytes)
        return -1

    def _go_on(self, number: int) -> None:
        late, _ = self.waiting[number]
        del self.waiting[number]
        if late.go_on():
            self.waiting.append((late, self._unit))


@dataclass(eq=False, slots=True)
class _Unit:
    """What adds work, `of` which block; and how many bytes it has added."""

    of: Any
    nbytes: float = 0.0
