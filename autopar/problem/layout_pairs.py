"""The routes between two lists of layout pairs. They are the same for every tensor, so that each two lists are looked
up once.

A row is how a producer makes a value and its gradient, a column how a reader asks for them. The gradient of a weight
goes from the reader to the *leaf*, and from the leaf to where the weight *rests* (problem.at_rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from autopar.cluster import Mesh
from autopar.layout import NO_GRAD, Layout, is_placed
from autopar.problem.at_rest import gathered_axes
from autopar.problem.pairs import LayoutPair, synced
from autopar.problem.routes import Routes, RouteTable


class Between:
    """The routes from each of `rows` to each of `columns`, out of those of one mesh."""

    def __init__(self, routes: Routes, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair]) -> None:
        self._routes, self.rows, self.columns = routes, rows, columns

    @cached_property
    def forward(self) -> RouteTable:
        """[rows, columns]: of the value, from row to column."""
        return self._routes.table([r.value for r in self.rows], [c.value for c in self.columns])

    @cached_property
    def back(self) -> RouteTable:
        """[rows, columns]: of the gradient, from column to row."""
        found = self._routes.table([c.back for c in self.columns], [r.back for r in self.rows])
        return RouteTable(found.numbers, found.at.T)

    @cached_property
    def graded(self) -> np.ndarray:
        """bool [rows, columns]: whether there is a gradient."""
        return np.logical_and.outer(
            [NO_GRAD not in r.grad for r in self.rows], [NO_GRAD not in c.grad for c in self.columns]
        )

    @cached_property
    def regathers(self) -> np.ndarray:
        """bool [rows, columns]: whether the value is all-gathered in a way that lets the copy be dropped after the
        forward and gathered again for the backward (codegen.edges.Reshard.regathers): not where the reader runs on one
        coordinate of an axis only."""
        placed = np.array([any(map(is_placed, c.value)) for c in self.columns])
        return self._routes.gathers(self.forward) & ~placed

    @cached_property
    def each(self) -> np.ndarray:
        """bool [rows, 1]: whether a weight's gradient is scattered after every microbatch."""
        return np.array([[r.each] for r in self.rows])

    @cached_property
    def once(self) -> list[int]:
        """The rows under which a weight is gathered once per step, not at each use (ZeRO-1 and 2)."""
        return [i for i, r in enumerate(self.rows) if gathered_axes(r.value, r.grad)]

    @cached_property
    def read(self) -> RouteTable:
        """[rows, columns]: of a weight's gradient, from what readers leave to that of the leaf."""
        backs, number = [column.back for column in self.columns], self._routes.number
        return RouteTable.of(
            [[number(back, leaf) for back, leaf in zip(backs, leaves, strict=True)] for leaves in self._leaves]
        )

    @cached_property
    def summed(self) -> RouteTable:
        """[rows, columns]: of a weight's gradient, from that of the leaf to that at rest."""
        backs, number = [row.back for row in self.rows], self._routes.number
        return RouteTable.of(
            [[number(leaf, back) for leaf in leaves] for back, leaves in zip(backs, self._leaves, strict=True)]
        )

    @cached_property
    def leaf(self) -> RouteTable:
        """[rows, 1]: of a weight, from rest to leaf."""
        return RouteTable.of(
            [[self._routes.number(r.back if i in self.once else r.value, r.value)] for i, r in enumerate(self.rows)]
        )

    @cached_property
    def _leaves(self) -> list[list[Layout]]:
        """[rows][columns]: of a weight's gradient, the layout of its leaf."""
        return [[LayoutPair(row.value, synced(row, column)).back for column in self.columns] for row in self.rows]


class PairRoutes(Routes):
    """The routes on one mesh; those between two lists of pairs are looked up once."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._between: dict[tuple[tuple[LayoutPair, ...], tuple[LayoutPair, ...]], Between] = {}

    def between(self, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair]) -> Between:
        """The routes from each of `rows` to each of `columns`."""
        key = (tuple(rows), tuple(columns))
        if key not in self._between:
            self._between[key] = Between(self, *key)
        return self._between[key]


@lru_cache(maxsize=64)
def routes_on(mesh: Mesh) -> PairRoutes:
    """The routes on a mesh: one object for all prices on it."""
    return PairRoutes(mesh)
