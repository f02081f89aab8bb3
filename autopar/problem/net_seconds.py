"""Seconds of the reshards of one net (problem.pass_tables), by mesh axis. Routes (problem.routes) are priced once each,
however many rows and columns of the net take them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(eq=False)
class NetSeconds:
    """`each` [distinct routes, quantities], and `at` [rows, columns of the net], which indexes the routes
    (problem.routes.RouteTable).

    Quantities, in seconds: local copies; by axis: gathers, other collectives, gathers without the first collective of
    the route, other collectives without it; then by axis, times the share of the axis's link: all collectives, and all
    but the first.
    """

    each: np.ndarray
    at: np.ndarray
    axes: int

    @property
    def local_s(self) -> np.ndarray:
        """[routes] seconds of local copies."""
        return self.each[:, 0]

    @property
    def by_axis(self) -> np.ndarray:
        """[routes, 4, axes] seconds of gathers and other collectives; then the same without the first collective."""
        return self.each[:, 1 : 1 + 4 * self.axes].reshape(len(self.each), 4, self.axes)

    @property
    def linked_s(self) -> np.ndarray:
        """[routes, 2, axes] seconds times shares of links: of all collectives, and of all but the first."""
        return self.each[:, 1 + 4 * self.axes :].reshape(len(self.each), 2, self.axes)

    @cached_property
    def all_s(self) -> np.ndarray:
        """[...] seconds of a whole route."""
        return np.asarray(self.each[:, : 1 + 2 * self.axes].sum(1)[self.at])


def over(seconds: np.ndarray, whole_s: np.ndarray) -> np.ndarray:
    """How often a route of `whole_s` fits into `seconds`; 0 where it takes no time."""
    return np.divide(seconds, whole_s, out=np.zeros_like(seconds), where=whole_s > 0)


def add_to(found: np.ndarray, each: np.ndarray, at: np.ndarray, times: np.ndarray | float) -> None:
    """Add `each` of the route at every place to `found`, `times` times."""
    if not each.any() or not np.any(times):
        return
    found += (times * each)[at] if isinstance(times, float) else times[..., None] * each[at]
