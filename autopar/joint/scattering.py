"""Plans in which gradients may also be scattered after every microbatch (ZeRO-2), and not only once per step (ZeRO-1).

That takes more collectives, which may hide, less memory, and less time to add gradients up. It is tried last: a first
look takes both for about as fast, and would end at worse solutions. Called by joint.explore.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.joint.pricing import Pricing
from autopar.joint.staging import Found
from autopar.joint.ways import leaving_room
from autopar.named_strategies import FULL


def scattered(pricing: Pricing, found: Found) -> Found | None:
    """The fastest such plan of `found`'s shape and timetable, where memory is short at any level of rematerialisation;
    None where none is faster than `found`, or it has a single microbatch."""
    if found.shape.microbatches == 1:
        return None
    pricing = replace(pricing, spare={})  # other gradients are held: they leave other room free
    best, roomy = found, found.filled < FULL and found.level == pricing.levels[0]
    for level in pricing.levels[:1] if roomy else pricing.levels:
        with suppress(InfeasibleError):
            made = _exact(pricing, found, level, best.step_s) if roomy else _at(pricing, found, level, best.step_s)
            best = made if made.step_s < best.step_s else best
    return None if best is found else best


def _at(pricing: Pricing, found: Found, level: str, cutoff_s: float) -> Found:
    """Such a plan at one level, at a glance. Where its walked memory is over the limit, an exact one that leaves as
    many bytes free. Raises as Pricing.price does."""
    made = pricing.price(found.shape, [found.table], level, exact=False, cutoff_s=cutoff_s, each=True)
    if made.step_s >= cutoff_s:
        return made
    try:
        return pricing.laid_exactly(made.shape, made.table, made.ground, made.chosen)
    except InfeasibleError as error:
        if not error.missing_bytes:
            raise
        overfull = pricing.overfull(made.shape, [made.chosen], error)
    return _exact(pricing, found, level, cutoff_s, overfull.spare_bytes)


def _exact(pricing: Pricing, found: Found, level: str, cutoff_s: float, spare_bytes: float = 0.0) -> Found:
    """The exact solution at one level that leaves `spare_bytes` free, or more where what runs takes more. Raises as
    Pricing.price does."""
    return leaving_room(
        lambda spare_bytes: pricing.price(
            found.shape, [found.table], level, exact=True, cutoff_s=cutoff_s, each=True, spare_bytes=spare_bytes
        ),
        spare_bytes,
    )
