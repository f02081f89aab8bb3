"""What the ways of one net take, each distinct one once (problem.pass_tables)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(eq=False)
class NetSeconds:
    """Of `each` distinct way the seconds of local copies; by axis those of gathers, of other collectives, and both but for the first collective of the way; then
    by the share that they take of the axis's link all of them, and all but the first. `at` [...] says which way is where."""

    each: np.ndarray
    at: np.ndarray
    axes: int

    @property
    def local_s(self) -> np.ndarray:
        """[ways] of local copies."""
        return self.each[:, 0]

    @property
    def by_axis(self) -> np.ndarray:
        """[ways, 4, axes] of all else."""
        return self.each[:, 1:1 + 4 * self.axes].reshape(len(self.each), 4, self.axes)

    @property
    def linked_s(self) -> np.ndarray:
        """[ways, 2, axes] by their shares of links."""
        return self.each[:, 1 + 4 * self.axes:].reshape(len(self.each), 2, self.axes)

    @cached_property
    def all_s(self) -> np.ndarray:
        """[...] seconds of a whole way."""
        return np.asarray(self.each[:, :1 + 2 * self.axes].sum(1)[self.at])


def over(seconds: np.ndarray, whole_s: np.ndarray) -> np.ndarray:
    """How often a way is gone in so many seconds; never where it takes none."""
    return np.divide(seconds, whole_s, out=np.zeros_like(seconds), where=whole_s > 0)


def add_to(found: np.ndarray, each: np.ndarray, at: np.ndarray, times: np.ndarray | float) -> None:
    """Adds what each way takes, so many times."""
    if not each.any() or not np.any(times):
        return
    found += (times * each)[at] if isinstance(times, float) else times[..., None] * each[at]
