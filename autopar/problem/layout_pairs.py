"""All ways between two lists of layouts with their gradients: what is the same for every tensor that goes them, found once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import numpy as np

from autopar.cluster import Mesh
from autopar.layout import NO_GRAD, Layout, is_placed
from autopar.problem.at_rest import gathered_axes
from autopar.problem.pairs import LayoutPair, synced
from autopar.problem.paths import Paths, Ways


class Between:
    """From each of `rows` to each of `columns` on the mesh of `known`."""

    def __init__(self, known: Paths, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair]) -> None:
        self._known, self.rows, self.columns = known, rows, columns

    @cached_property
    def forward(self) -> Ways:
        """[rows, columns] of values."""
        return self._known.ways([r.value for r in self.rows], [c.value for c in self.columns])

    @cached_property
    def back(self) -> Ways:
        """[rows, columns] of gradients, from column to row."""
        found = self._known.ways([c.back for c in self.columns], [r.back for r in self.rows])
        return Ways(found.numbers, found.at.T)

    @cached_property
    def graded(self) -> np.ndarray:
        """bool [rows, columns]: whether there is a gradient."""
        return np.logical_and.outer([NO_GRAD not in r.grad for r in self.rows], [NO_GRAD not in c.grad for c in self.columns])

    @cached_property
    def regathers(self) -> np.ndarray:
        """bool [rows, columns]: whether a gathered copy may be dropped and gathered again (codegen.edges.Reshard.regathers says why)."""
        placed = np.array([any(map(is_placed, c.value)) for c in self.columns])
        return self._known.gathers(self.forward) & ~placed

    @cached_property
    def each(self) -> np.ndarray:
        """bool [rows, 1]: whether a weight's gradient is scattered after every microbatch."""
        return np.array([[r.each] for r in self.rows])

    @cached_property
    def once(self) -> list[int]:
        """The rows of weights that are gathered once per step."""
        return [i for i, r in enumerate(self.rows) if gathered_axes(r.value, r.grad)]

    @cached_property
    def read(self) -> Ways:
        """[rows, columns] from the gradients that readers leave to that of the leaf."""
        return self._each(lambda row, column: (column.back, LayoutPair(row.value, synced(row, column)).back))

    @cached_property
    def summed(self) -> Ways:
        """[rows, columns] from the gradient of the leaf to that at rest."""
        return self._each(lambda row, column: (LayoutPair(row.value, synced(row, column)).back, row.back))

    @cached_property
    def leaf(self) -> Ways:
        """[rows, 1] from rest to leaf."""
        return Ways.of([[self._known.number(r.back if i in self.once else r.value, r.value)] for i, r in enumerate(self.rows)])

    def _each(self, ends: Callable[[LayoutPair, LayoutPair], tuple[Layout, Layout]]) -> Ways:
        return Ways.of([[self._known.number(*ends(row, column)) for column in self.columns] for row in self.rows])


class Routes(Paths):
    """The ways on one mesh, those between lists that were asked for before kept."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._between: dict[tuple[tuple[LayoutPair, ...], tuple[LayoutPair, ...]], Between] = {}

    def between(self, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair]) -> Between:
        """The ways from each of `rows` to each of `columns`."""
        key = (tuple(rows), tuple(columns))
        if key not in self._between:
            self._between[key] = Between(self, *key)
        return self._between[key]


@lru_cache(maxsize=64)
def routes_on(mesh: Mesh) -> Routes:
    """The one Routes of a mesh, for all prices on it."""
    return Routes(mesh)
