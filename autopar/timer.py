"""The time that a search may take, and whether anything was left out for want of it. Made by api and
joint.search_context, asked by the searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

TIME_LIMIT_S = 24.0
"""The default time limit of a search. With the capture before it and the emission after it, `compile` takes about half
a minute."""

GRACE = 0.1
"""Share of the time limit by which what has begun may go on beyond it."""


class Timer:
    """Runs from when it is made, for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.hurried = False
        """Whether something that was promising was left out."""
        self.ends_at = time.monotonic() + limit_s
        """When time is up (time.monotonic)."""

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative where it is late."""
        return self.ends_at - time.monotonic()

    @property
    def halfway(self) -> float:
        """The time (time.monotonic) at which half of what is left is over."""
        return self.after(0.5)

    def after(self, share: float) -> float:
        """The time (time.monotonic) at which that share of what is left is over."""
        return self.ends_at - self.left_s * (1 - share)

    @property
    def late(self) -> bool:
        """Whether time is up."""
        return self.left_s <= 0

    def skips(self, until: float | None = None, *, begun: bool = False) -> bool:
        """Whether it is too late for something promising: time is up, or it is after `until` (time.monotonic). Sets
        `hurried` where it is. What has `begun` has GRACE."""
        grace_s = GRACE * self.limit_s if begun else 0.0
        late = self.left_s <= -grace_s or (until is not None and time.monotonic() >= until)
        self.hurried = self.hurried or late
        return late

    def grace(self) -> Callable[[], bool]:
        """What says whether GRACE is over, counted from now where time is already up: for what ends a search, which may
        be late. Sets `hurried` where it is."""
        until = max(self.ends_at, time.monotonic()) + GRACE * self.limit_s

        def late() -> bool:
            over = time.monotonic() >= until
            self.hurried = self.hurried or over
            return over

        return late

    def noted(self, notes: Sequence[str]) -> tuple[str, ...]:
        """The notes of a plan; where something was left out for want of time, with the note that says so."""
        return tuple(dict.fromkeys((*notes, self.note))) if self.hurried else tuple(notes)

    @property
    def note(self) -> str:
        """The note of a plan whose search left something out for want of time."""
        return (
            f"time was up ({self.limit_s:g} s) before all that is promising was priced: with a longer time limit there "
            "may be a faster plan"
        )
