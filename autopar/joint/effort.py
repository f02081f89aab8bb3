"""How closely a bound is looked for."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDS = 24
"""Rounds of cutting planes, where more of them prove nothing more."""

CASES = 1024
"""So many cases at most of one shape (joint.wait_cases)."""


@dataclass(frozen=True)
class Effort:
    """`rounds` of cutting planes, and where there are `cases`, so many of these at most, with every Problem solved to
    the end."""

    rounds: int
    cases: int = 0


CLOSEST = Effort(ROUNDS, CASES)
"""As close as can be."""
