"""How well each constant explains what was measured, and what was left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.calibrate.samples import Rejected, Sample, sensible


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
        return f"{self.samples} samples, mean error {100 * self.error:.1f} %" if self.samples > 2 else f"{self.samples} samples"


@dataclass
class Fits:
    """All constants that were fitted, and all samples that make no sense."""

    found: list[Fit] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def add(self, *found: Fit) -> None:
        """Note constants."""
        self.found += found

    def sensible(self, samples: Sequence[Sample], rate: Callable[[Sample], float], limit: float, unit: str) -> list[Sample]:
        """`samples.sensible`, the others noted."""
        kept, rejected = sensible(samples, rate, limit, unit)
        self.rejected += rejected
        return kept
