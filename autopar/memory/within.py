"""Plans whose peak fits. A Problem counts what rests, what is kept and gathered weights, which is linear in its choices; the walk
over the emitted program counts everything. What a Problem accepts and the walk does not is solved again with less room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autopar.errors import InfeasibleError

T = TypeVar("T")
TRIES = 4
STUCK = 0.1  # relative: a peak that is above the limit by nearly as much as before


def within(limit_bytes: float, solve: Callable[[float], T], peak_bytes: Callable[[T], float], tries: int = TRIES) -> T:
    """What `solve` gives for `limit_bytes`, or for less room where the peak of that is above the limit, in so many `tries`.

    Raises InfeasibleError with the bytes that are missing where `solve` does, or where nothing that it gave fits.
    """
    allowed, over, step = limit_bytes, 0.0, 0.0
    for _ in range(tries):
        found = solve(allowed)
        before, over = over, peak_bytes(found) - limit_bytes
        if over <= 0:
            return found
        step = 2 * step if 0 < before <= over * (1 + STUCK) else over  # the answer may be of whole blocks: so little less room changes nothing
        allowed -= step
        if allowed <= 0:
            break
    raise InfeasibleError(f"the peak of the step is {over / 2**30:.2f} GiB over the {limit_bytes / 2**30:.2f} GiB of a device, with all that lives "
                          "only for a moment (autopar memory shows what)", missing_bytes=over)
