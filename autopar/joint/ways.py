"""The fastest of some ways to run a solution, of which those are priced that an estimate leaves hope for, and the
simplest of some results that are about as fast. Called by joint.pricing and joint.explore."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint.place_kinds import Ground
from autopar.joint.shape_problems import Chosen
from autopar.joint.staging import Found
from autopar.joint.timetables import Timetable
from autopar.text import seconds

T = TypeVar("T")
TRIES = 2


@dataclass(frozen=True, eq=False)
class Glance:
    """One result of a glance: choices under a timetable on some places, and the seconds of a step."""

    step_s: float
    table: Timetable
    ground: Ground
    chosen: Chosen


class Beaten(InfeasibleError):
    """No plan on a shape is as fast as was asked for: `bound_s` is a proven lower bound in seconds; `full`: more memory
    might allow a faster one."""

    def __init__(self, bound_s: float, *, full: bool) -> None:
        super().__init__(f"no plan there is faster than {seconds(bound_s)}")
        self.bound_s, self.full = bound_s, full


class Overfull(InfeasibleError):
    """What a Problem counts fits, and what runs does not: others may that leave `spare_bytes` of a place free."""

    def __init__(self, error: InfeasibleError, spare_bytes: float) -> None:
        super().__init__(str(error), error.missing_bytes)
        self.spare_bytes = spare_bytes


def leaving_room(price: Callable[[float], Found], spare_bytes: float = 0.0) -> Found:
    """The result of `price(spare_bytes)`, where bytes of a place stay free, or of TRIES more of them where it is
    Overfull. Raises as `price`."""
    for _ in range(TRIES):
        try:
            return price(spare_bytes)
        except Overfull as error:
            spare_bytes = error.spare_bytes
    return price(spare_bytes)


def even_s(table: Timetable, ground: Ground, chosen: Chosen) -> float:
    """An estimate of the seconds of a step of `chosen` under `table`, cut evenly, in which no block is run again that
    does not have to be.

    It is no bound: a pipeline with a short first or last stage fills sooner, and may take a few per cent less
    (tests/unit/joint/test_timetables.py says how much). 0 for devices that run faster while others wait: nothing is
    known then.
    """
    if ground.places.device(0).alone > 1:
        return 0.0
    paces = [1 / float(chosen.on(place, kind).table.seconds[-1]) for place, kind in enumerate(ground.kinds)]
    return table.least_length * table.places / sum(paces)


def fastest(
    ways: Iterable[T], price: Callable[[T], Found], hoped_s: Callable[[T], float], late: Callable[[], bool]
) -> Found:
    """The fastest result of `price` over `ways`; a way whose estimate `hoped_s` is no better than the best so far is
    left out, and once `late` all behind the first that fits. Raises the last InfeasibleError where no way fits."""
    best: Found | None = None
    failed = InfeasibleError("")
    for way in ways:
        if best is not None and (hoped_s(way) >= best.step_s or late()):
            continue
        try:
            found = price(way)
        except InfeasibleError as error:
            failed = error
            continue
        best = found if best is None or found.step_s < best.step_s else best
    if best is None:
        raise failed
    return best


def first_that_fits(price: Callable[..., Found], tables: list[Timetable], levels: Iterable[str]) -> Found:
    """The result of `price` at the first of `levels` at which anything fits. Raises InfeasibleError."""
    for level in levels:
        with suppress(InfeasibleError):
            return price(tables, level)
    raise InfeasibleError("")


def filled_with(found: Found, microbatches: int, rest: float) -> float:
    """The share of its memory that the fullest place of `found` fills with another number of microbatches, of which
    stages keep as many as before; `rest`: the least share for weights, gradients and optimizer state, which stay."""
    return rest + (found.filled - rest) * found.shape.microbatches / microbatches


def simplest(results: Sequence[Found], known_s: float) -> Found | None:
    """The simplest of the results that are as fast as the fastest one up to PRICE_TOLERANCE, the accuracy of prices:
    the one with fewest places, then fewest stages, then fewest microbatches; None where there are none.

    Where the fastest beats `known_s`, a step known from elsewhere, by more than PRICE_TOLERANCE, so does this one;
    otherwise a plan from elsewhere would be taken that is slower than the fastest by up to twice that.
    """
    fastest_s = min((found.step_s for found in results), default=math.inf)
    beating_s = known_s * (1 - PRICE_TOLERANCE)
    near = [
        found
        for found in results
        if found.step_s <= fastest_s * (1 + PRICE_TOLERANCE) and (found.step_s < beating_s or fastest_s >= beating_s)
    ]
    return min(near, key=lambda f: (f.table.places, f.table.stages, f.table.microbatches, f.step_s), default=None)
