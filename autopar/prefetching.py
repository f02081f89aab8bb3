"""How far ahead of their use gathers of weights begin (prefetching), counted in units (a block, or a weight outside of
blocks), and gathers of leaves (runtime.leaves), counted in buckets and blocks.

One rule, shared by what runs (runtime.prefetch), its simulation and its price (pipeline.chains), and its memory
(memory.ahead).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from autopar.buckets import BUCKET_BYTES, SOON

LEAVES_AHEAD = 2
"""How many buckets of leaves at least are gathered before they are needed: while one is unpacked the next ones travel.
A block waits for all of its own, so that while one computes, all of those of the next one travel."""


def ends(nbytes: Sequence[float], at: int, legs: int, ahead_bytes: float = BUCKET_BYTES) -> tuple[int, ...]:
    """For each leg of the gathers, the index of the first unit whose leg need not have begun yet when unit `at` begins.

    `nbytes` are the bytes that each unit gathers, in the order of use. A gather over several mesh axes is a chain of
    `legs` collectives.

    The first leg begins for the next unit, and for further units until `ahead_bytes` are in flight: a small gather
    alone would hide nothing. The last of several legs begins for the next unit alone, or for a few small ones that
    together have SOON * `ahead_bytes`. Each leg begins one unit earlier than the leg after it, so that every leg has
    the time of one unit to complete.
    """
    soon = [_reach(nbytes, min(at + early, len(nbytes) - 1), SOON * ahead_bytes) for early in reversed(range(legs))]
    return tuple([max(_reach(nbytes, at, ahead_bytes), end) if leg == 0 else end for leg, end in enumerate(soon)])


def _reach(nbytes: Sequence[float], at: int, ahead_bytes: float) -> int:
    """The index behind the units that are gathered ahead while unit `at` runs: at least one, and as many as it takes
    until they have `ahead_bytes`."""
    end, ahead = at + 1, 0.0
    while end < len(nbytes) and ahead < ahead_bytes:
        ahead += nbytes[end]
        end += 1
    return end


class Part(Protocol):
    """What `timetable` needs to know of one gather."""

    @property
    def unit(self) -> Any:
        """The unit that it belongs to: a block, or a weight outside of blocks."""

    @property
    def nbytes(self) -> float:
        """Bytes of the result on the fullest rank."""

    @property
    def legs(self) -> int:
        """The number of its collectives, which run one after the other."""


def timetable(plan: Sequence[Part], ahead_bytes: float) -> dict[int, tuple[int, ...]]:
    """By the number of each gather of `plan` that begins a unit: the gathers that go on then, each by one collective,
    in this order (`ends`).

    What the unit itself needs has begun all of its collectives before others begin, which would be in front of it on an
    axis of theirs.
    """
    starts = [at for at, part in enumerate(plan) if not at or plan[at - 1].unit != part.unit]
    stops = [*starts, len(plan)][1:]  # where each unit ends
    nbytes = [sum(part.nbytes for part in plan[at:stop]) for at, stop in zip(starts, stops, strict=True)]
    ways = {part.legs for part in plan}
    begun, found = [0] * len(plan), dict[int, tuple[int, ...]]()
    for unit, at in enumerate(starts):
        until = {legs: [stops[end - 1] for end in ends(nbytes, unit, legs, ahead_bytes)] for legs in ways}
        reached = max(stop for each in until.values() for stop in (at, *each))
        wanted = {number: sum(number < stop for stop in until[plan[number].legs]) for number in range(at, reached)}
        rounds = [
            [number for number, legs in wanted.items() if (number < stops[unit]) == own and begun[number] <= leg < legs]
            for own in (True, False)
            for leg in range(max(ways))
        ]
        found[at] = tuple(number for here in rounds for number in here)
        for number in found[at]:
            begun[number] += 1
    return found


def due(legs: Sequence[int], until: Sequence[int], begun: Sequence[int], done: int) -> list[int]:
    """The buckets of leaves that begin their next collective, in this order, when `done` buckets are filled.

    `legs` are the numbers of collectives that each takes, `begun` those that it has begun; `until`, of each bucket, the
    index behind the last one that its first reader waits for. The last collectives begin for all buckets of the next
    reader, and for LEAVES_AHEAD of them at least; each of the others one reader earlier.
    """
    deepest, wanted, end = max(legs, default=0), dict[int, int](), done
    for behind in range(deepest):
        begin = end
        end = min(len(legs), max(begin + (1 if behind else LEAVES_AHEAD), until[begin])) if begin < len(legs) else begin
        wanted |= {number: legs[number] - behind for number in range(begin, end)}
    return [number for leg in range(deepest) for number, upto in wanted.items() if begun[number] <= leg < upto]
