"""Work on its way in the background: whole gradients that are being scattered and sums of them, so many bytes at a time. One rule for what runs (runtime.gradsync), for the
simulation of it (simulate.rank) and for the memory that it takes (memory.backward, memory.buckets)."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Protocol, TypeVar


class Late(Protocol):
    """Work in parts, the first of which runs."""

    @property
    def nbytes(self) -> float:
        """Bytes that are there until the part that runs is over."""

    def go_on(self) -> bool:
        """Wait for that part and begin the next one, or end; whether there is more to do later."""

    def wait(self) -> None:
        """Wait for that part, and do no more."""


Kind = TypeVar("Kind", bound=Late)

BUCKETS = 2
"""So many buckets of whole gradients that are scattered may wait behind those of a block."""


class Queue(Generic[Kind]):
    """Late work, oldest first. What one unit adds goes on when a later one has added `limit_bytes` behind it: a block's scatters hide under all of
    its backward, and whole gradients of hardly more than one block are there. What has another part then waits as if the later unit had added it."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.waiting: deque[tuple[Kind, Any]] = deque()

    def add(self, late: Kind, unit: Any) -> None:
        """One more, which belongs to `unit`; what must not wait any longer goes on."""
        self.waiting.append((late, unit))
        while self.waiting[0][1] != unit and sum(other.nbytes for other, _ in self.waiting) - self.waiting[0][0].nbytes > self.limit_bytes:
            self._go_on(unit)

    def drain(self) -> None:
        """Finish everything, part by part."""
        while self.waiting:
            self._go_on(None)

    def drop(self) -> None:
        """Nothing of it is wanted; what runs is waited for, since all ranks take part in it."""
        while self.waiting:
            self.waiting.popleft()[0].wait()

    def _go_on(self, unit: Any) -> None:
        late, _ = self.waiting.popleft()
        if late.go_on():
            self.waiting.append((late, unit))
