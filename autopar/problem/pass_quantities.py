"""The indices of quantities in the tables of problem.pass_tables: SHOWN, COMPUTE, WAITED and INPUTS first, then those
that there are for each mesh axis."""

from __future__ import annotations

import numpy as np

from autopar.problem.build import Model

SHOWN, COMPUTE, WAITED, INPUTS = range(4)
PLAIN = 4
"""The number of quantities that are not per axis."""


class Quantities:
    """The index of each quantity in the last dim of the tables of `model`; `linked` as in PassTables."""

    model: Model
    linked: bool

    @property
    def axes(self) -> int:
        """The number of mesh axes."""
        return len(self.model.prices.sizes)

    @property
    def width(self) -> int:
        """The number of quantities of a table."""
        return PLAIN + 4 * self.axes + 2 * self.axes * self.linked

    def ahead(self, axis: int) -> int:
        """The index of AHEAD for an axis."""
        return PLAIN + axis

    def behind(self, axis: int) -> int:
        """The index of BEHIND for an axis."""
        return PLAIN + self.axes + axis

    def waits(self, axis: int) -> int:
        """The index of WAITS for an axis."""
        return PLAIN + 3 * self.axes + axis

    def leaf(self, axis: int) -> int:
        """The index of LEAF for an axis."""
        return PLAIN + 2 * self.axes + axis

    def links_waited(self, axis: int) -> int:
        """The index of LINKS for an axis: collectives that compute waits for."""
        assert self.linked, "tables without `linked` have no LINKS"
        return self.waits(self.axes) + axis

    def links_behind(self, axis: int) -> int:
        """The index of LINKS for an axis: background collectives."""
        return self.links_waited(axis) + self.axes

    def background_s(self, quantities: np.ndarray) -> float:
        """Seconds of all background collectives in one pass, LEAF included, whether or not they are exposed."""
        return float(quantities[PLAIN : self.waits(0)].sum())
