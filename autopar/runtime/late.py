"""Work on its way in the background: whole gradients that are being scattered, so many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Late:
    """What `finish` waits for, of `nbytes` until then; it belongs to `unit`."""

    finish: Callable[[], None]
    nbytes: float
    unit: Any


class Queue:
    """Late work, oldest first. What one unit adds stays until a later one has added `limit_bytes` behind it: a block's scatters hide under all of
    its backward, and whole gradients of hardly more than one block are there."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.waiting: deque[Late] = deque()

    def add(self, finish: Callable[[], None], nbytes: float, unit: Any) -> None:
        """One more; what must not wait any longer is finished."""
        self.waiting.append(Late(finish, nbytes, unit))
        while self.waiting[0].unit != unit and sum(late.nbytes for late in self.waiting) - self.waiting[0].nbytes > self.limit_bytes:
            self.waiting.popleft().finish()

    def drain(self) -> None:
        """Finish everything."""
        while self.waiting:
            self.waiting.popleft().finish()
