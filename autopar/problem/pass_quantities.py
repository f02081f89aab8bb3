"""Where the tables of pass_tables have which quantity: SHOWN, COMPUTE, WAITED and INPUTS first, then those by mesh
axis."""

from __future__ import annotations

import numpy as np

from autopar.problem.build import Model

SHOWN, COMPUTE, WAITED, INPUTS = range(4)
PLAIN = 4
"""How many quantities there are that are not by axis."""


class Quantities:
    """The number of each quantity in the last dim of the tables of `model`; `linked` as in PassTables."""

    model: Model
    linked: bool

    @property
    def axes(self) -> int:
        """How many mesh axes there are."""
        return len(self.model.prices.sizes)

    @property
    def width(self) -> int:
        """How many quantities a table has."""
        return PLAIN + 4 * self.axes + 3 * self.axes * self.linked

    def ahead(self, axis: int) -> int:
        """The quantity AHEAD of an axis."""
        return PLAIN + axis

    def behind(self, axis: int) -> int:
        """The quantity BEHIND of an axis."""
        return PLAIN + self.axes + axis

    def waits(self, axis: int) -> int:
        """The quantity WAITS of an axis."""
        return PLAIN + 3 * self.axes + axis

    def leaf(self, axis: int) -> int:
        """The quantity LEAF of an axis."""
        return PLAIN + 2 * self.axes + axis

    def links_waited(self, axis: int) -> int:
        """The quantity LINKS of an axis, for collectives that compute waits for."""
        assert self.linked, "tables without `linked` have no LINKS"
        return self.waits(self.axes) + axis

    def links_behind(self, axis: int) -> int:
        """The quantity LINKS of an axis, for background collectives."""
        return self.links_waited(axis) + self.axes

    def late_leaf(self, axis: int) -> int:
        """The quantity LATE of an axis."""
        return self.links_behind(axis) + self.axes

    def background_s(self, quantities: np.ndarray) -> float:
        """Seconds of all background collectives in one pass, LEAF included, whether or not they are exposed."""
        return float(quantities[PLAIN : self.waits(0)].sum())
