"""How closely a bound is looked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ROUNDS = 24
"""Rounds of cutting planes, where more of them prove nothing more."""

CASES = 1024
"""So many cases at most of one shape (joint.cases)."""


@dataclass
class Meter:
    """How much may be spent, in cases."""

    left: float = math.inf

    def spend(self, cases: float = 1.0) -> None:
        """So much less is left."""
        self.left -= cases


@dataclass(frozen=True)
class Effort:
    """`rounds` of cutting planes, and where there are `cases`, so many of these at most while `meter` has any left, with every Problem solved to the end."""

    rounds: int
    cases: int = 0
    meter: Meter = field(default_factory=Meter)


CLOSEST = Effort(ROUNDS, CASES)
"""As close as can be."""
