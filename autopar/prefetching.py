"""How far ahead of their use gathers of weights begin (prefetching), counted in units: a block, or a weight outside of blocks.

One rule, shared by what runs (runtime.prefetch), its simulation (simulate.chains), its memory (memory.ahead) and its price (pipeline.pass_ends).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.layout import BUCKET_BYTES, SOON


def ends(nbytes: Sequence[float], at: int, legs: int, ahead_bytes: float = BUCKET_BYTES) -> tuple[int, ...]:
    """For each leg of the gathers, the index of the first unit whose leg need not have begun yet when unit `at` begins.

    `nbytes` are the bytes that each unit gathers, in the order of use. A gather over several mesh axes is a chain of `legs` collectives.

    The first leg begins for the next unit, and for further units until `ahead_bytes` are in flight: a small gather alone would hide nothing.
    The last of several legs begins for the next unit alone, or for a few small ones that together have SOON * `ahead_bytes`. Each leg
    begins one unit earlier than the leg after it, so that every leg has the time of one unit to complete.
    """
    soon = [_reach(nbytes, min(at + early, len(nbytes) - 1), SOON * ahead_bytes) for early in reversed(range(legs))]
    return tuple([max(_reach(nbytes, at, ahead_bytes), end) if leg == 0 else end for leg, end in enumerate(soon)])


def _reach(nbytes: Sequence[float], at: int, ahead_bytes: float) -> int:
    """The index behind the units that follow unit `at`: as many of them, one at least, as it takes to have `ahead_bytes`."""
    end, ahead = at + 1, 0.0
    while end < len(nbytes) and ahead < ahead_bytes:
        ahead += nbytes[end]
        end += 1
    return end
