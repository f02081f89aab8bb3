"""Spaces: which shapes, roles and timetables a search or a named pipeline may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape, counts, layouts
from autopar.joint.timetables import SEARCHED, Kind
from autopar.pipeline.schedules import SCHEDULES
from autopar.recipes import roles
from autopar.recipes.free import space, spaces
from autopar.recipes.pipelines import PipelineRecipe
from autopar.recipes.roles import Role
from autopar.text import gibibytes, near, times

Used = tuple[Role, ...]
MOST_NAMED = 12  # meshes in a message


@dataclass(frozen=True)
class Space:
    """`roles_on(mesh)` gives what the axes of a place's mesh may do, None for meshes that are not in the space;
    `alone`: whether one place with several microbatches is in it; `mesh`: the only one there is in it, None where that
    is the one that was asked for, if any."""

    name: str
    roles_on: Callable[[tuple[int, ...]], Used | None]
    kinds: tuple[Kind, ...]
    axes: int
    alone: bool = False
    mesh: tuple[int, ...] | None = None

    def shapes(self, context: SearchContext) -> list[Shape]:
        """All shapes of the space on the cluster that `context` is for, in order."""
        return sorted(
            shape
            for shape in self._laid(context)
            if self._rests_bytes(context, shape) <= context.mean_bytes(shape.places)
        )

    def none(self, context: SearchContext) -> str:
        """Why the space has no shapes."""
        short = min(
            ((self._rests_bytes(context, shape), context.mean_bytes(shape.places)) for shape in self._laid(context)),
            key=lambda bytes_: bytes_[0] - bytes_[1],
            default=None,
        )
        if short is not None:
            rests, room = (gibibytes(nbytes) for nbytes in short)
            return (
                f"weights, gradients and optimizer state alone take {rests} per device, cut as evenly as its axes "
                f"allow, {room} are there: use more or larger devices, or a recipe that cuts them over more ranks"
            )
        return (
            f"no way to lay {context.pieces} pieces and a batch of {context.batch} on "
            f"{context.request.cluster.devices} devices" + (f" ({context.sharable})" if context.sharable else "")
        )

    def _laid(self, context: SearchContext) -> Iterator[Shape]:
        """All shapes, whatever the memory is."""
        cluster, fixed = context.request.cluster, self.mesh or context.request.mesh
        found = [(1, mesh) for mesh in spaces(cluster, context.whole.cuts_samples)] if self.alone else []
        found += self.layouts(context)
        for places, mesh in dict.fromkeys(found):
            yield from (Shape(places, mesh, m) for m in self._counts(context, places, mesh) if fixed in (None, mesh))

    def layouts(self, context: SearchContext) -> list[tuple[int, tuple[int, ...]]]:
        """All (places, mesh of a place) with two or more places for which there are enough pieces."""
        return layouts(context.request.cluster, self.axes, context.pieces // self.least_stages)

    @property
    def least_stages(self) -> int:
        """How many stages a place has at least."""
        return min(kind.virtual or 2 for kind in self.kinds)

    def _counts(self, context: SearchContext, places: int, mesh: tuple[int, ...]) -> Iterator[int]:
        used = self.roles_on(mesh)
        if used is None:
            return
        if all(SCHEDULES[kind.schedule].name == "naive" for kind in self.kinds):
            yield 1
            return
        if context.sharable:
            return
        ways = math.prod(n for n, role in zip(mesh, used, strict=True) if role in roles.BY_SAMPLE)
        yield from (m for m in counts(context.batch, max(2, places)) if context.batch % (m * ways) == 0)

    def _rests_bytes(self, context: SearchContext, shape: Shape) -> float:
        """Bytes per device of weights, gradients and optimizer state alone, cut as evenly as the roles allow."""
        used = self.roles_on(shape.mesh) or ()
        return context.rest_bytes / (
            shape.places * math.prod(n for n, role in zip(shape.mesh, used, strict=True) if role is not roles.data)
        )


def _anything(mesh: tuple[int, ...]) -> Used:
    """What the axes of a place may do in the free search."""
    return (roles.nothing,) if mesh == (1,) else space(mesh)


SEARCH = Space("search", _anything, SEARCHED, axes=2, alone=True)
"""Several microbatches, on one place or more."""

NAIVE = Space("naive", _anything, (Kind("naive"),), axes=2)
"""One microbatch on several places, which run one after the other: where every microbatch costs much to start, or the
batch cannot be cut into any."""

FREE = (SEARCH, NAIVE)
"""The spaces of the free search. Each named pipeline is part of one of them."""


def of_recipe(recipe: PipelineRecipe) -> Space:
    """What a named pipeline leaves open: the shape. Raises PlanError where its schedule is none."""
    if recipe.schedule not in SCHEDULES:
        raise PlanError(
            f"recipe {recipe.name}: schedule is {recipe.schedule!r}, wanted one of "
            f"{', '.join(SCHEDULES)}{near(recipe.schedule, SCHEDULES)}"
        )
    virtual = SCHEDULES[recipe.schedule].virtual or recipe.virtual
    return Space(recipe.name, recipe.roles_on, (Kind(recipe.schedule, virtual),), len(recipe.roles))


def asked(recipe: PipelineRecipe, context: SearchContext) -> Space:
    """What a named pipeline leaves open with the mesh of a place that was asked for, if one was. An axis of size 1 has
    nothing to do: it is left out, with its role.

    Raises PlanError, with the meshes that are possible, where there are no stages on places of that mesh.
    """
    mesh, found = context.request.mesh, of_recipe(recipe)
    if mesh is None:
        return found
    small, used = tuple(size for size in mesh if size != 1) or (1,), recipe.roles_on(mesh)
    if used is None and (small == (1,) or len(small) == len(recipe.roles)):
        used = recipe.roles_on(small)
    elif used is not None and small != (1,):
        used = tuple(role for role, size in zip(used, mesh, strict=True) if size != 1)
    possible = list(dict.fromkeys(sizes for _, sizes in found.layouts(context)))
    if used is None or small not in possible:
        raise PlanError(_impossible(found, context, mesh, possible))
    return replace(found, roles_on=lambda sizes: used if sizes == small else None, mesh=small)


def _impossible(
    found: Space, context: SearchContext, mesh: tuple[int, ...], possible: Sequence[tuple[int, ...]]
) -> str:
    """Why no place of a pipeline has a mesh, and which it may have."""
    devices, size, axes, each = context.request.cluster.devices, math.prod(mesh), found.axes, found.least_stages
    if len(mesh) > axes:
        why = f"its places have {axes} ax{'i' if axes == 1 else 'e'}s at most"
    elif size < 1 or devices % size:
        why = f"places of {size} do not fill {devices} devices"
    elif devices == size:
        why = f"that leaves one place of {devices} devices, and stages take two or more"
    else:
        stages = f", of {each} stages each," if each > 1 else ""
        why = (
            f"its {devices // size} places{stages} do not lie so on the devices, or are more than the {context.pieces} "
            "pieces that the model can be cut into"
        )
    wanted = ", ".join(map(times, possible[:MOST_NAMED])) + ", or others" * (len(possible) > MOST_NAMED)
    return (
        f"recipe {found.name} cannot have mesh {times(mesh)} in each place on {context.request.cluster.label}: {why}; "
        + (f"wanted {wanted}" if possible else "use another recipe")
    )
