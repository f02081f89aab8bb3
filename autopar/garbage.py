"""Python's garbage collector while a plan is made. Used by api.compile.

Planning makes millions of small objects that live to its end, and the collector's default thresholds walk them all
again and again (6 % of the processor time of planning Llama-3-8B); hardly any of them is garbage in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 50, 100)
"""As gc.set_threshold takes them: new objects until the youngest generation is collected, and collections of one
generation until the next older one is. With these, garbage of torch.export is still freed, about 20 MiB later."""


@contextmanager
def seldom() -> Iterator[None]:
    """A context in which garbage is collected at THRESHOLDS; where the collector is off, or collects less often, that
    stays."""
    before = gc.get_threshold()
    if before[0] and before[0] < THRESHOLDS[0]:
        gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
