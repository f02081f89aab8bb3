"""Plans whose peak fits: `within` solves a Problem with lower and lower memory limits until the walked peak is within
the real one. Called by onestage and joint.staging.

A Problem counts the bytes that are linear in its choices: parameters and their state, what the backward keeps, gathered
weights. The memory walk over the emitted program counts everything, temporaries too. A solution that the Problem
accepts and the walk rejects is replaced by that of the same Problem with a lower limit (here: less *room*)."""

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
MORE = 3  # further tries, of rooms between those that were tried
NEAR = 0.02  # relative: rooms closer than this are taken for the same
STUCK = 0.1  # relative: a peak that exceeds the limit by as much as before, but for this, has not improved


def within(
    limit_bytes: float,
    solve: Callable[[float], T],
    peak_bytes: Callable[[T], float],
    tries: int = TRIES,
    *,
    counted_bytes: Callable[[T], float] = lambda found: math.inf,
) -> T:
    """The result of `solve(room)` whose `peak_bytes` is within `limit_bytes`, for as much room as possible.

    The first room is the limit itself. While the peak is too high, the room shrinks by the excess, at most `tries`
    times. Where that makes it too small for `solve`, rooms between it and the last one that had a result are bisected.
    Less room can come with larger temporaries, so that a room that fits was skipped: then up to MORE rooms in between
    are tried. Where there is a wide gap between the room that fits and one that does not, one room in the middle is
    tried as well.

    `counted_bytes` is what the Problem counts for a result, if that is known: any room from there to the one it was
    solved for has the same result, and is not tried again.

    Raises InfeasibleError with the missing bytes: that of `solve` where it finds nothing for `limit_bytes`, else with
    the excess of the least peak.
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
    """The results so far, by the bytes of their room that they fill: `peaks`, and the most room for which each was the
    result (`asked`). `least` is the most room for which `solve` found nothing."""

    limit_bytes: float
    solve: Callable[[float], T]
    peak_bytes: Callable[[T], float]
    counted_bytes: Callable[[T], float]
    peaks: dict[float, float] = field(default_factory=dict)
    asked: dict[float, float] = field(default_factory=dict)
    least: float = 0.0

    def solved(self, room: float) -> tuple[T, float, float]:
        """Solve for `room`: the result, the bytes of the room that it fills, and by how many bytes its peak exceeds the
        limit."""
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
        """By how many bytes the peak of the result that fills `room` exceeds the limit."""
        return self.peaks[room] - self.limit_bytes

    def shrinking(self, tries: int) -> T:
        """The first result that fits, of less and less room."""
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
            # results may differ by whole blocks, so that a small step changes nothing
            step = 2 * step if 0 < before <= over * (1 + STUCK) else over
            allowed = given - step
            if allowed <= 0:
                return self._between(0.0, given, _over(over, self.limit_bytes))
        raise _over(over, self.limit_bytes)

    def _between(self, least: float, given: float, failed: InfeasibleError) -> T:
        """Bisect from `least`, the least room for which there may be a result, to `given`, whose result does not fit:
        the first result that fits. Raises `failed`, or the last error of `solve`, where none does."""
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
        """`found`, which fits, or a result with more room that also does: the middle between the room of `found` and
        the least that does not fit is tried, where these are far apart."""
        given = max(self.asked[own] for own in self.peaks if self.over(own) <= 0)
        above = min((own for own in self.peaks if own > given), default=given)
        if above - given <= 2 * NEAR * self.limit_bytes:
            return found
        with suppress(InfeasibleError):
            other, _, over = self.solved((given + above) / 2)
            return other if over <= 0 else found
        return found

    def passed_by(self) -> float | None:
        """A room to try that the shrinking skipped; None where there is none.

        It is what the result with the least peak fills, less its excess. If that was tried, it is the middle of the
        widest gap between two results of which the one with less room has the larger temporaries.
        """
        if not self.peaks:
            return None
        filled, near = sorted(self.peaks), NEAR * self.limit_bytes
        closest = min(filled, key=self.peaks.__getitem__)
        room = closest - self.over(closest)
        if room > self.least + near and not any(own - near <= room <= self.asked[own] + near for own in filled):
            return room
        steps = [
            (more - self.asked[less], self.asked[less])
            for less, more in itertools.pairwise(filled)
            if self.peaks[less] - less > self.peaks[more] - more
        ]
        width, less = max(steps, default=(0.0, 0.0))
        return less + width / 2 if width > near else None


def _least_bytes(allowed: float, given: float, error: InfeasibleError) -> float:
    """The least room that may have a result, where `allowed` has none and `given` has one. What the error says is
    missing may be too much, and is ignored then."""
    said = allowed + (error.missing_bytes or 0.0)
    return said if said < given else allowed


def _over(over: float, limit_bytes: float) -> InfeasibleError:
    """The error where the least peak exceeds the limit by `over` bytes."""
    return InfeasibleError(
        f"the peak of the step is {gibibytes(over)} over the {gibibytes(limit_bytes)} of a device, with all that lives "
        "only for a moment (autopar memory shows what)",
        missing_bytes=over,
    )
