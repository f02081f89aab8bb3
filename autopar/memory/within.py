"""Plans whose peak fits. A Problem counts what rests, what is kept and gathered weights, which is linear in its choices; the walk
over the emitted program counts everything. What a Problem accepts and the walk does not is solved again with less room."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autopar.errors import InfeasibleError
from autopar.text import gibibytes

T = TypeVar("T")
TRIES = 4
MORE = 2  # tries of rooms that were passed by
NEAR = 0.02  # relative: of rooms that are so near the least is tried alone
STUCK = 0.1  # relative: a peak that is above the limit by nearly as much as before


def within(limit_bytes: float, solve: Callable[[float], T], peak_bytes: Callable[[T], float], tries: int = TRIES) -> T:
    """What `solve` gives for `limit_bytes`, or for less room where the peak of that is above the limit, in so many `tries`. Where `solve` finds
    nothing for so little room, or none would be left, rooms between that and the least for which it found anything are tried. What needs more for a moment
    with less room may have passed by what fits: then rooms between are tried too.

    Raises InfeasibleError with the bytes that are missing where `solve` does, or where nothing that it gave fits.
    """
    rooms = _Rooms(limit_bytes, solve, peak_bytes)
    try:
        return rooms.shrinking(tries)
    except InfeasibleError:
        for _ in range(MORE):
            if (room := rooms.passed_by()) is None:
                break
            found = rooms.solved(room)
            if rooms.over(room) <= 0:
                return found
        raise


@dataclass(eq=False)
class _Rooms(Generic[T]):
    """Rooms that were tried, with the peaks of what came of it."""

    limit_bytes: float
    solve: Callable[[float], T]
    peak_bytes: Callable[[T], float]
    peaks: dict[float, float] = field(default_factory=dict)

    def solved(self, room: float) -> T:
        """What there is for so much room, its peak counted."""
        found = self.solve(room)
        self.peaks[room] = self.peak_bytes(found)
        return found

    def over(self, room: float) -> float:
        """By how much that is above the limit."""
        return self.peaks[room] - self.limit_bytes

    def shrinking(self, tries: int) -> T:
        """What fits of ever less room."""
        allowed, given, over, step = self.limit_bytes, self.limit_bytes, 0.0, 0.0
        for _ in range(tries):
            try:
                found = self.solved(allowed)
            except InfeasibleError as error:
                if over <= 0:
                    raise
                return self._between(_least_bytes(allowed, given, error), given, error)
            before, over = over, self.over(allowed)
            if over <= 0:
                return found
            step = 2 * step if 0 < before <= over * (1 + STUCK) else over  # the answer may be of whole blocks: so little less room changes nothing
            given, allowed = allowed, allowed - step
            if allowed <= 0:
                return self._between(0.0, given, _over(over, self.limit_bytes))
        raise _over(over, self.limit_bytes)

    def _between(self, least: float, given: float, failed: InfeasibleError) -> T:
        """The first answer that fits, with less room than `given`, for which one does not, and no less than the `least` for which there may be any. Raises `failed`, or
        what `solve` raised last."""
        for left in reversed(range(TRIES)):
            allowed = least if not left or given - least <= NEAR * given else (least + given) / 2
            last = allowed == least
            try:
                if allowed > 0:
                    found = self.solved(allowed)
                    if self.over(allowed) <= 0:
                        return found
                given = allowed
            except InfeasibleError as error:
                failed, least = error, _least_bytes(allowed, given, error)
            if last:
                break
        raise failed

    def passed_by(self) -> float | None:
        """The middle of the widest step from one room to a lesser one whose answer has more above its room; None where there is none that is wide."""
        rooms = sorted(self.peaks)
        steps = [(more - less, less) for less, more in itertools.pairwise(rooms) if self.peaks[less] < self.peaks[more] and self.peaks[less] - less > self.peaks[more] - more]
        width, less = max(steps, default=(0.0, 0.0))
        return less + width / 2 if width > NEAR * self.limit_bytes else None


def _least_bytes(allowed: float, given: float, error: InfeasibleError) -> float:
    """The least room that may be enough, where `allowed` is not and `given` is; what is missing may be said too large."""
    said = allowed + (error.missing_bytes or 0.0)
    return said if said < given else allowed


def _over(over: float, limit_bytes: float) -> InfeasibleError:
    return InfeasibleError(f"the peak of the step is {gibibytes(over)} over the {gibibytes(limit_bytes)} of a device, with all that lives "
                           "only for a moment (autopar memory shows what)", missing_bytes=over)
