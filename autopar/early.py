"""Gathers that begin before their use, unit by unit (a block, or a weight of the model itself): how far ahead of the unit that begins. One rule for what runs (runtime.ahead), for the
simulation of it (simulate.chains), for the memory that it takes (memory.ahead) and for prices (pipeline.lines)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.layout import BUCKET_BYTES, SOON


def ends(nbytes: Sequence[float], at: int, legs: int, ahead_bytes: float = BUCKET_BYTES) -> tuple[int, ...]:
    """Of units that gather so many bytes each, in order: behind which of them those end of whose gathers over so many axes (`legs`) the first collective is to have begun when
    number `at` begins, those of which the second one, and so on.

    The first collectives begin for the next unit, and for further ones until `ahead_bytes` are on their way: small ones would hide nothing. The last of several begins for the next
    unit alone, or a small part of those bytes, each of the others one unit earlier than the one behind it, so that all of them have a unit's time.
    """
    soon = [_reach(nbytes, min(at + early, len(nbytes) - 1), SOON * ahead_bytes) for early in reversed(range(legs))]
    return tuple([max(_reach(nbytes, at, ahead_bytes), end) if leg == 0 else end for leg, end in enumerate(soon)])


def _reach(nbytes: Sequence[float], at: int, ahead_bytes: float) -> int:
    """The first unit behind number `at`, the next one and those that follow until these are so many bytes."""
    end, ahead = at + 1, 0.0
    while end < len(nbytes) and ahead < ahead_bytes:
        ahead += nbytes[end]
        end += 1
    return end
