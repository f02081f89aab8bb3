"""The members of a cluster under the choices of the cluster. Many choices split a member in the same *way* (one option
per axis), so that each distinct way is kept, and priced, once. Made by problem.build, read by prices and tables of
Problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.layout import Layout
from autopar.problem.branches import coordinate_of
from autopar.problem.clusters import Cluster, Joint
from autopar.problem.graph import Op
from autopar.rules.language import Option
from autopar.rules.tiles import tiled

Choice = tuple[Joint, ...]  # one joint option per axis
Way = tuple[Option, ...]  # what one Op does: an option per axis


@dataclass(eq=False, slots=True)
class Member:
    """One Op of a cluster.

    ways     its distinct ways
    at       [choices] the number of the way under each choice
    runs     for each way, whether a runtime algorithm runs on some axis
    tiles    for each way, whether weights are gathered in tiles
    """

    op: Op
    ways: list[Way]
    at: np.ndarray
    runs: list[bool]
    tiles: list[bool]

    @staticmethod
    def of(op: Op, ways: Sequence[Way]) -> Member:
        """From the way of `op` under each choice."""
        numbers: dict[tuple[int, ...], int] = {}
        at = np.array([numbers.setdefault(tuple(map(id, way)), len(numbers)) for way in ways], int)
        first = np.full(len(numbers), len(ways))
        np.minimum.at(first, at, np.arange(len(ways)))
        distinct = [ways[i] for i in first]
        runs = [any(option.run for option in way) for way in distinct]
        return Member(op, distinct, at, runs, [run and tiled(way) > 1 for run, way in zip(runs, distinct, strict=True)])

    def each(self, price: Callable[[Op, Way], float], wanted: Sequence[bool] | None = None) -> np.ndarray:
        """[choices]: the `price` of the Op in the way that each choice has; 0 for ways that are not `wanted` (None: all
        are)."""
        return np.array(
            [price(self.op, way) if wanted is None or wanted[i] else 0.0 for i, way in enumerate(self.ways)], float
        )[self.at]

    def both(
        self, price: Callable[[Op, Way], tuple[float, float]], wanted: Sequence[bool] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `each`, for a function that gives two prices."""
        found = np.array(
            [price(self.op, way) if wanted is None or wanted[i] else (0.0, 0.0) for i, way in enumerate(self.ways)],
            float,
        )[self.at]
        return found[:, 0], found[:, 1]

    def lying(self, output: int) -> list[Layout]:
        """The layout of output number `output` in each way."""
        return [tuple([option.outs[output].value for option in way]) for way in self.ways]

    @property
    def placed(self) -> np.ndarray:
        """bool [choices]: whether it works on one coordinate of some axis."""
        return np.array([any(coordinate_of(option) is not None for option in way) for way in self.ways], bool)[self.at]


def members_of(cluster: Cluster, choices: Sequence[Choice]) -> list[Member]:
    """The members of `cluster` in order under each of its choices."""
    return [
        Member.of(op, [tuple([joint.options[m] for joint in combo]) for combo in choices])
        for m, op in enumerate(cluster.members)
    ]
