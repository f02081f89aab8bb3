"""Plans whose peak fits. A Problem counts what rests, what is kept and gathered weights, which is linear in its choices; the walk
over the emitted program counts everything. What a Problem accepts and the walk does not is solved again with less room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autopar.errors import InfeasibleError
from autopar.text import gibibytes

T = TypeVar("T")
TRIES = 4
NEAR = 0.02  # relative: of rooms that are so near the least is tried alone
STUCK = 0.1  # relative: a peak that is above the limit by nearly as much as before


def within(limit_bytes: float, solve: Callable[[float], T], peak_bytes: Callable[[T], float], tries: int = TRIES) -> T:
    """What `solve` gives for `limit_bytes`, or for less room where the peak of that is above the limit, in so many `tries`. Where `solve` finds
    nothing for so little room, or none would be left, rooms between that and the least for which it found anything are tried.

    Raises InfeasibleError with the bytes that are missing where `solve` does, or where nothing that it gave fits.
    """
    allowed, given, over, step = limit_bytes, limit_bytes, 0.0, 0.0
    for _ in range(tries):
        try:
            found = solve(allowed)
        except InfeasibleError as error:
            if over <= 0:
                raise
            return _between(_least_bytes(allowed, given, error), given, solve, lambda found: peak_bytes(found) <= limit_bytes, error)
        before, over = over, peak_bytes(found) - limit_bytes
        if over <= 0:
            return found
        step = 2 * step if 0 < before <= over * (1 + STUCK) else over  # the answer may be of whole blocks: so little less room changes nothing
        given, allowed = allowed, allowed - step
        if allowed <= 0:
            return _between(0.0, given, solve, lambda found: peak_bytes(found) <= limit_bytes, _over(over, limit_bytes))
    raise _over(over, limit_bytes)


def _between(least: float, given: float, solve: Callable[[float], T], fits: Callable[[T], bool], failed: InfeasibleError) -> T:
    """The first answer that fits, with less room than `given`, for which one does not, and no less than the `least` for which there may be any. Raises `failed`, or
    what `solve` raised last."""
    for left in reversed(range(TRIES)):
        allowed = least if not left or given - least <= NEAR * given else (least + given) / 2
        last = allowed == least
        try:
            if allowed > 0 and fits(found := solve(allowed)):
                return found
            given = allowed
        except InfeasibleError as error:
            failed, least = error, _least_bytes(allowed, given, error)
        if last:
            break
    raise failed


def _least_bytes(allowed: float, given: float, error: InfeasibleError) -> float:
    """The least room that may be enough, where `allowed` is not and `given` is; what is missing may be said too large."""
    said = allowed + (error.missing_bytes or 0.0)
    return said if said < given else allowed


def _over(over: float, limit_bytes: float) -> InfeasibleError:
    return InfeasibleError(f"the peak of the step is {gibibytes(over)} over the {gibibytes(limit_bytes)} of a device, with all that lives "
                           "only for a moment (autopar memory shows what)", missing_bytes=over)
