"""How much work is put into a bound: limits on rounds of cutting planes and on cases. Set by joint.prove for each
look."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ROUNDS = 24
"""Rounds of cutting planes at most: more hardly raise a bound."""

MOST_CASES = 1024
"""Cases of one shape at most (joint.wait_cases)."""


@dataclass(frozen=True)
class Effort:
    """`rounds` of cutting planes, and where there are `cases`, so many of these at most, none begun after `ends_at`
    (time.monotonic), with every Problem solved to the end."""

    rounds: int
    cases: int = 0
    ends_at: float = math.inf


CLOSEST = Effort(MOST_ROUNDS, MOST_CASES)
"""The effort for the highest bound."""
