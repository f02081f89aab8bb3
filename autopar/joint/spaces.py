"""Spaces: which shapes, roles and timetables a search or a named pipeline may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.joint.inner import Inner
from autopar.joint.shapes import Shape, counts, layouts
from autopar.joint.timetables import SEARCHED, Kind
from autopar.pipeline.schedules import SCHEDULES
from autopar.recipes import roles
from autopar.recipes.free import space, spaces
from autopar.recipes.pipelines import PipelineRecipe
from autopar.recipes.roles import Role

Used = tuple[Role, ...]


@dataclass(frozen=True)
class Space:
    """`roles_on(mesh)` gives what the axes of a place's mesh may do, None for meshes that are not in the space; `alone`: whether
    one place with several microbatches is in it."""

    name: str
    roles_on: Callable[[tuple[int, ...]], Used | None]
    kinds: tuple[Kind, ...]
    axes: int
    alone: bool = False

    def shapes(self, inner: Inner) -> list[Shape]:
        """All shapes of the space on the cluster that `inner` is for, in order."""
        cluster, fixed = inner.request.cluster, inner.request.mesh
        found = [(1, mesh) for mesh in spaces(cluster, inner.whole.cuts_samples)] if self.alone else []
        found += layouts(cluster, self.axes, inner.pieces)
        return sorted(Shape(places, mesh, m) for places, mesh in dict.fromkeys(found) if fixed in (None, mesh)
                      for m in self._counts(inner, places, mesh))

    def _counts(self, inner: Inner, places: int, mesh: tuple[int, ...]) -> Iterator[int]:
        used = self.roles_on(mesh)
        if used is None or not _may_rest(inner, places, mesh, used):
            return
        if all(SCHEDULES[kind.schedule].name == "naive" for kind in self.kinds):
            yield 1
            return
        if inner.sharable:
            return
        ways = math.prod(n for n, role in zip(mesh, used, strict=True) if role in roles.BY_SAMPLE)
        yield from (m for m in counts(inner.batch, max(2, places)) if inner.batch % (m * ways) == 0)


def _may_rest(inner: Inner, places: int, mesh: tuple[int, ...], used: Used) -> bool:
    """Whether weights, gradients and optimizer state alone can fit when cut as evenly as the roles allow."""
    cut = places * math.prod(n for n, role in zip(mesh, used, strict=True) if role is not roles.data)
    return inner.rest_bytes / cut <= inner.mean_bytes(places)


SEARCH = Space("search", lambda mesh: (roles.nothing,) if mesh == (1,) else space(mesh), SEARCHED, axes=2, alone=True)


def of_recipe(recipe: PipelineRecipe) -> Space:
    """What a named pipeline leaves open: the shape."""
    virtual = SCHEDULES[recipe.schedule].virtual or recipe.virtual
    return Space(recipe.name, recipe.roles_on, (Kind(recipe.schedule, virtual),), len(recipe.roles))
