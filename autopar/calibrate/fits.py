"""How well each constant explains what was measured, and what was left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from autopar.calibrate.samples import Rejected, Sample, sensible
from autopar.cluster.check import RANGES


@dataclass(frozen=True, slots=True)
class Fit:
    """One constant: its value, from how many samples, the mean of their relative errors under it, and what was run."""

    name: str
    value: float
    samples: int
    error: float
    about: str

    @property
    def quality(self) -> str:
        """`11 samples, mean error 4.2 %`."""
        return (
            f"{self.samples} samples, mean error {100 * self.error:.1f} %"
            if self.samples > 2
            else f"{self.samples} samples"
        )


@dataclass(frozen=True, slots=True)
class Impossible:
    """A constant that was left out though there were samples: what they say it is, and what it can be."""

    name: str
    value: float
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.3g}: {self.why}"


@dataclass
class Fits:
    """All constants that were fitted, all samples that make no sense, and all constants that come out as no machine has
    them."""

    found: list[Fit] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    impossible: list[Impossible] = field(default_factory=list)

    def add(self, *found: Fit) -> None:
        """Note constants."""
        self.found += found

    def sensible(
        self, samples: Sequence[Sample], rate: Callable[[Sample], float], limit: float, unit: str
    ) -> list[Sample]:
        """`samples.sensible`, the others noted."""
        kept, rejected = sensible(samples, rate, limit, unit)
        self.rejected += rejected
        return kept

    def possible(self, name: str, value: float, limit: float = inf, *, key: str = "") -> bool:
        """Whether the constant `name` can be `value`, which is at most `limit` and in the range of `key` (`name`,
        without what is behind its dot); what cannot be is noted."""
        low, high, meaning = RANGES[key or name.partition(".")[0]]
        high = min(high, limit)
        if not low <= value <= high:
            self.impossible.append(Impossible(name, value, f"wanted {low:g} to {high:.3g} ({meaning})"))
        return low <= value <= high
