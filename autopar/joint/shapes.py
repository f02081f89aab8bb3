"""Shapes (number of places of a pipeline, mesh of each, number of microbatches): their enumeration, the neighbours of
each, and where joint.explore starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cluster import Cluster, pipelines
from passes import facts

# per `least` microbatches (as many as there are places); with more, the fixed costs of each microbatch dominate
MOST_MICROBATCHES = 512


@dataclass(frozen=True, order=True, slots=True)
class Shape:
    """`places` of the pipeline axis (1: no pipeline), the `mesh` of each, and the microbatches of a step."""

    places: int
    mesh: tuple[int, ...]
    microbatches: int

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return (
            f"{self.places} places of {mesh}, {self.microbatches} microbatches"
            if self.places > 1
            else f"{mesh}, {self.microbatches} microbatches"
        )

    @property
    def naive(self) -> bool:
        """Whether places run one after the other, as they have one microbatch between them."""
        return self.places > 1 and self.microbatches == 1

    @property
    def unfilled(self) -> bool:
        """Whether there are several microbatches, but fewer than places, so that some of these always wait."""
        return 1 < self.microbatches < self.places

    @property
    def key(self) -> tuple[int, ...]:
        """Places and axes as four numbers, from the slowest links to the fastest."""
        return (self.places, *(1,) * (3 - len(self.mesh)), *self.mesh)


FILLING = 4
"""Microbatches for each place of a pipeline with which its places wait little."""

QuickLook = Callable[[tuple[Shape, ...], float], float]
"""(shapes that are bounded together, a cutoff in seconds) -> a lower bound in seconds of all plans on them, which need
not be exact above the cutoff."""


def layouts(cluster: Cluster, most_axes: int, pieces: int) -> list[tuple[int, tuple[int, ...]]]:
    """All (places, mesh of a place) with two or more places, but no more than `pieces` (operators and blocks), and
    meshes of at most `most_axes` axes; none where that is 0."""
    return [(places, mesh) for places, mesh in (pipelines(cluster, most_axes) if most_axes else []) if places <= pieces]


def counts(batch: int, least: int) -> list[int]:
    """The numbers of microbatches, at least `least`, into which a batch divides, the fewest first."""
    return [n for n in range(max(1, least), min(batch, MOST_MICROBATCHES * least) + 1) if batch % n == 0]


def sample_groups(gm: fx.GraphModule, batch: int) -> int:
    """Of how many groups a batch is, of which a microbatch has whole ones: where the model looks at several samples
    together (answers to one question), the batch is a multiple of their number."""
    return batch // facts.spans(gm).get("b", (0, None, 1))[2]


def neighbours(shape: Shape, among: Sequence[Shape]) -> list[Shape]:
    """The shapes of `among` that are one move away: the next number of microbatches up or down; or one prime factor
    moved from one axis to another (the pipeline axis included), with the number of microbatches that leaves about as
    many samples on a rank."""
    same = sorted(s.microbatches for s in among if s.key == shape.key)
    at = same.index(shape.microbatches)
    found = [Shape(shape.places, shape.mesh, m) for m in (*same[max(0, at - 1) : at], *same[at + 1 : at + 2])]
    others: dict[tuple[int, ...], list[Shape]] = {}
    for other in among:
        if other.key != shape.key and _one_move(shape.key, other.key):
            others.setdefault(other.key, []).append(other)
    samples = shape.microbatches * _ways(shape)
    found += [
        min(filled(group), key=lambda s: (abs(math.log(s.microbatches * _ways(s) / samples)), s))
        for group in others.values()
    ]
    return found


def filled(shapes: Sequence[Shape]) -> list[Shape]:
    """`shapes` without those whose pipelines are not filled, unless there are no others: these are one move down from
    others of the same places and mesh."""
    return [shape for shape in shapes if not shape.unfilled] or [*shapes]


def like_parts(shapes: Sequence[Shape], batch: int) -> list[Shape]:
    """Where the walk on a cluster of several parts begins: as few places as there may be of several, so that each is as
    large as can be within a part, with the mesh of one axis that a part alone most often has, and about FILLING
    microbatches for each place, or as many as leave each rank one sample. A slower part has less of the model then, and
    what another one alone can do is hardly missed."""
    several = [shape for shape in filled(shapes) if shape.places > 1 and len(shape.mesh) == 1]
    few = [shape for shape in several if shape.places == min(other.places for other in several)]

    def off(shape: Shape) -> float:
        return abs(math.log(shape.microbatches / min(FILLING * shape.places, batch / shape.mesh[0])))

    return sorted(few, key=lambda shape: (off(shape), shape.microbatches))[:1]


def _ways(shape: Shape) -> int:
    """The number of ranks on all axes of a place but the innermost: most often these axes split samples."""
    return math.prod(shape.mesh[:-1])


def _one_move(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether, from `a` to `b`, one size is multiplied by a prime, another divided by it, and all others are equal."""
    more = [y // x for x, y in zip(a, b, strict=True) if y > x and y % x == 0]
    less = [x // y for x, y in zip(a, b, strict=True) if x > y and x % y == 0]
    equal = sum(x == y for x, y in zip(a, b, strict=True))
    return len(more) == len(less) == 1 and equal == len(a) - 2 and more == less and _prime(more[0])


def _prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


def fewest(batch: int) -> int:
    """The least number of several microbatches into which a batch of two or more divides: its least prime factor."""
    return next((n for n in range(2, math.isqrt(batch) + 1) if batch % n == 0), batch)


def starts(shapes: Sequence[Shape], node: int, batch: int) -> list[Shape]:
    """Where the walk begins: for each number of places the mesh whose innermost axis is nearest in size to a `node` (in
    devices), with about as many microbatches as leave each rank of the other axes one sample. For one place also the
    mesh of one axis, with about as many microbatches as leave each rank one sample."""
    found = []
    for places, group in itertools.groupby(sorted(shapes), key=lambda s: s.places):
        here = filled(list(group))
        found.append(
            min(
                here,
                key=lambda s: (
                    abs(math.log(s.mesh[-1] / node)),
                    len(s.mesh),
                    abs(math.log(s.microbatches * _ways(s) / batch)),
                    s.microbatches,
                ),
            )
        )
        flat = [s for s in here if len(s.mesh) == 1 and places == 1]
        found += sorted(flat, key=lambda s: (abs(math.log(s.microbatches * s.mesh[0] / batch)), s.microbatches))[:1]
    return list(dict.fromkeys(found))
