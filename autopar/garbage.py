"""Python's garbage collector while a plan is made.

Planning makes millions of small objects that live to its end, and the collector's default thresholds walk them all
again and again (6 % of the processor time of planning Llama-3-8B); hardly any of them is garbage in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 50, 100)
"""Objects until the youngest are looked at, and collections until the next older ones are: torch.export's garbage still
goes, 20 MiB late."""


@contextmanager
def seldom() -> Iterator[None]:
    """Garbage is collected seldom inside; where it was seldomer or off before, that stays."""
    before = gc.get_threshold()
    if before[0] and before[0] < THRESHOLDS[0]:
        gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
