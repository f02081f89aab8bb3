"""Plans in which gradients may also be scattered after every microbatch (ZeRO-2), and not only once per step (ZeRO-1).

That takes more collectives and less memory, so that it is tried where a shape is short of it, and last: Problems of a
first look take both for about as fast, as collectives hide under compute, and would end at worse solutions. Called by
joint.explore.
"""

from __future__ import annotations

from contextlib import suppress

from autopar.errors import InfeasibleError
from autopar.joint.pricing import Pricing
from autopar.joint.staging import Found
from autopar.named_strategies import FULL


def may_gain(pricing: Pricing, found: Found) -> bool:
    """Whether a shape has several microbatches and is short of memory."""
    return found.shape.microbatches > 1 and (found.filled >= FULL or found.level != pricing.levels[0])


def scattered(pricing: Pricing, found: Found) -> Found | None:
    """The fastest such plan of `found`'s shape and timetable, at any level of rematerialisation; None where none is
    faster than `found`."""
    best = found
    for level in pricing.levels:
        with suppress(InfeasibleError):
            made = _at(pricing, found, level, best.step_s)
            best = made if made.step_s < best.step_s else best
    return None if best is found else best


def _at(pricing: Pricing, found: Found, level: str, cutoff_s: float) -> Found:
    """Such a plan at one level, at a glance. Where its walked memory is over the limit, an exact one that leaves as
    many bytes free. Raises as Pricing.price does."""

    def laid(spare_bytes: float, *, exact: bool) -> Found:
        made = pricing.price(
            found.shape, [found.table], level, exact=exact, cutoff_s=cutoff_s, each=True, spare_bytes=spare_bytes
        )
        if exact or made.step_s >= cutoff_s:
            return made
        return pricing.laid_exactly(made.shape, made.table, made.ground, made.chosen)

    try:
        return laid(0.0, exact=False)
    except InfeasibleError as error:
        if not error.missing_bytes:
            raise
        return laid(error.missing_bytes, exact=True)
