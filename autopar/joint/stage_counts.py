"""A result under its schedule with other numbers of stages per place: more of them fill a pipeline sooner, and send
more. A glance tries few numbers; with cuts that are shifted one in between may be the fastest. Called by
joint.explore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from autopar.errors import InfeasibleError
from autopar.joint.pricing import Pricing
from autopar.joint.staging import Found
from autopar.joint.timetables import Timetable


def with_other_stages(pricing: Pricing, found: Found, late: Callable[[], bool]) -> Found:
    """`found`, or the same choices in more or fewer stages, laid out as they run, where that is faster: from its number
    on upwards, and downwards, as long as steps get shorter and it is not `late`."""
    schedule, virtual = found.table.kind.schedule, found.table.virtual
    tables = [table for table in pricing.tables(found.shape, finely=True) if table.kind.schedule == schedule]
    more = [table for table in tables if table.virtual > virtual]
    fewer = [table for table in tables if table.virtual < virtual]
    return min((*_faster(pricing, found, more, late), *_faster(pricing, found, fewer[::-1], late), found), key=_step_s)


def _faster(pricing: Pricing, found: Found, tables: list[Timetable], late: Callable[[], bool]) -> Iterator[Found]:
    """The results under `tables`, in order, until one is slower than the one before."""
    before_s = found.step_s
    for table in tables:
        if late():
            return
        with suppress(InfeasibleError):
            made = pricing.laid_exactly(found.shape, table, found.ground, found.chosen)
            yield made
            if made.step_s > before_s:
                return
            before_s = made.step_s


def _step_s(found: Found) -> float:
    return found.step_s
