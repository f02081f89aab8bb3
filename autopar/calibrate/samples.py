"""What was measured, and which of it makes sense.

Noise of a machine only ever adds time, so where a smaller task took clearly longer than a larger one, the smaller one
is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLOWER = 1.3
"""How much longer than a larger task a smaller one may take before it is taken for noise."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing that ran: `what` ("matmul float32", "copy", "all_reduce"), its `size` (m, n, k of a matmul, bytes else,
    elements of an optimizer's parameter), how many ranks took part (1: each on its own), and the `seconds` of one
    run."""

    what: str
    size: tuple[int, ...]
    seconds: float
    members: int = 1

    def __str__(self) -> str:
        ranks = f" on {self.members} ranks" if self.members > 1 else ""
        return f"{self.what} of {'x'.join(map(str, self.size))}{ranks}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample that was left out, and why."""

    sample: Sample
    why: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.sample.seconds:.3g} s: {self.why}"


def sensible(
    samples: Sequence[Sample], rate: Callable[[Sample], float], limit: float, unit: str
) -> tuple[list[Sample], list[Rejected]]:
    """The samples that can be true, and the others with the reason.

    `rate` is what a sample did per second, `limit` the most that the hardware can do of it, in `unit`. Samples of one
    kind and one number of ranks are compared with each other where one is larger in every size.
    """
    kept, rejected = [], []
    for sample in samples:
        why = _nonsense(sample, rate, limit, unit)
        rejected += [Rejected(sample, why)] if why else []
        kept += [] if why else [sample]
    for sample in list(kept):
        larger = [other for other in kept if _larger(other, sample) and sample.seconds > SLOWER * other.seconds]
        if larger:
            kept.remove(sample)
            rejected.append(Rejected(sample, f"longer than {larger[0]}, which took {larger[0].seconds:.3g} s"))
    return kept, rejected


def _nonsense(sample: Sample, rate: Callable[[Sample], float], limit: float, unit: str) -> str:
    if not math.isfinite(sample.seconds) or sample.seconds <= 0:
        return "no time can be that; wanted a positive number of seconds"
    if rate(sample) > limit:
        return f"{rate(sample):.3g} {unit} is above the limit of the hardware, {limit:.3g}"
    return ""


def _larger(other: Sample, sample: Sample) -> bool:
    alike = (other.what, other.members) == (sample.what, sample.members) and other.size != sample.size
    return alike and all(a >= b for a, b in zip(other.size, sample.size, strict=True))
