"""Plans whose peak fits. A Problem counts what rests, what is kept and gathered weights, which is linear in its choices; the walk
over the emitted program counts everything. What a Problem accepts and the walk does not is solved again with less room."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autopar.errors import InfeasibleError
from autopar.text import gibibytes

T = TypeVar("T")
TRIES = 4
MORE = 3  # tries of rooms that were passed by
NEAR = 0.02  # relative: of rooms that are so near the least is tried alone
STUCK = 0.1  # relative: a peak that is above the limit by nearly as much as before


def within(limit_bytes: float, solve: Callable[[float], T], peak_bytes: Callable[[T], float], tries: int = TRIES, *,
           counted_bytes: Callable[[T], float] = lambda found: math.inf) -> T:
    """What `solve` gives for `limit_bytes`, or for less room where the peak of that is above the limit, in so many `tries`. Of an answer that it counts as so many bytes (`counted_bytes`, where
    that is known) there is no other for any room between that and what it was given. Where `solve` finds nothing for so little room, or none would be left, rooms between that and the least for
    which it found anything are tried. What needs more for a moment with less room may have passed by what fits: then rooms between are tried too, and where that is wide one between what
    fits and what does not.

    Raises InfeasibleError with the bytes that are missing: what `solve` raises where it finds nothing for `limit_bytes`, and where nothing that it gave fits by how much the least peak is above them.
    """
    rooms = _Rooms(limit_bytes, solve, peak_bytes, counted_bytes)
    try:
        found = rooms.shrinking(tries)
    except InfeasibleError as error:
        for _ in range(MORE):
            if (room := rooms.passed_by()) is None:
                break
            with suppress(InfeasibleError):
                found, _, over = rooms.solved(room)
                if over <= 0:
                    return found
        if not rooms.peaks:
            raise
        raise _over(min(map(rooms.over, rooms.peaks)), limit_bytes) from error
    return rooms.fuller(found)


@dataclass(eq=False)
class _Rooms(Generic[T]):
    """Answers by how much of their room they fill: their peaks, and the most room that they were `asked` for with; of `least` there is nothing."""

    limit_bytes: float
    solve: Callable[[float], T]
    peak_bytes: Callable[[T], float]
    counted_bytes: Callable[[T], float]
    peaks: dict[float, float] = field(default_factory=dict)
    asked: dict[float, float] = field(default_factory=dict)
    least: float = 0.0

    def solved(self, room: float) -> tuple[T, float, float]:
        """What there is for so much room, how much of that it fills, and by how much its peak is above the limit."""
        try:
            found = self.solve(room)
        except InfeasibleError:
            self.least = max(self.least, room)
            raise
        filled = min(room, self.counted_bytes(found))
        self.asked[filled] = max(room, self.asked.get(filled, 0.0))
        self.peaks[filled] = self.peak_bytes(found)
        return found, filled, self.over(filled)

    def over(self, room: float) -> float:
        """By how much that is above the limit."""
        return self.peaks[room] - self.limit_bytes

    def shrinking(self, tries: int) -> T:
        """What fits of ever less room."""
        allowed, given, over, step = self.limit_bytes, self.limit_bytes, 0.0, 0.0
        for _ in range(tries):
            before = over
            try:
                found, given, over = self.solved(allowed)
            except InfeasibleError as error:
                if before <= 0:
                    raise
                return self._between(_least_bytes(allowed, given, error), given, error)
            if over <= 0:
                return found
            step = 2 * step if 0 < before <= over * (1 + STUCK) else over  # the answer may be of whole blocks: so little less room changes nothing
            allowed = given - step
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
                    found, allowed, over = self.solved(allowed)
                    if over <= 0:
                        return found
                given = allowed
            except InfeasibleError as error:
                failed, least = error, _least_bytes(allowed, given, error)
            if last:
                break
        raise failed

    def fuller(self, found: T) -> T:
        """`found`, which fits, or what fits of more room: of the middle between what that was given and the least that does not fit, where that is wide."""
        given = max(self.asked[own] for own in self.peaks if self.over(own) <= 0)
        above = min((own for own in self.peaks if own > given), default=given)
        if above - given <= 2 * NEAR * self.limit_bytes:
            return found
        with suppress(InfeasibleError):
            other, _, over = self.solved((given + above) / 2)
            return other if over <= 0 else found
        return found

    def passed_by(self) -> float | None:
        """What the answer whose peak is least fills, less by what that is above the limit; where that was tried, or something near it, the middle of the widest step from one answer to a
        lesser one that has more above its room. None where there is none that is wide, or nothing was found at all."""
        if not self.peaks:
            return None
        filled, near = sorted(self.peaks), NEAR * self.limit_bytes
        closest = min(filled, key=self.peaks.__getitem__)
        room = closest - self.over(closest)
        if room > self.least + near and not any(own - near <= room <= self.asked[own] + near for own in filled):
            return room
        steps = [(more - self.asked[less], self.asked[less]) for less, more in itertools.pairwise(filled) if self.peaks[less] - less > self.peaks[more] - more]
        width, less = max(steps, default=(0.0, 0.0))
        return less + width / 2 if width > near else None


def _least_bytes(allowed: float, given: float, error: InfeasibleError) -> float:
    """The least room that may be enough, where `allowed` is not and `given` is; what is missing may be said too large."""
    said = allowed + (error.missing_bytes or 0.0)
    return said if said < given else allowed


def _over(over: float, limit_bytes: float) -> InfeasibleError:
    return InfeasibleError(f"the peak of the step is {gibibytes(over)} over the {gibibytes(limit_bytes)} of a device, with all that lives "
                           "only for a moment (autopar memory shows what)", missing_bytes=over)
