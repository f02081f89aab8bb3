"""Spaces: which shapes, roles and timetables the search or a named pipeline may use. joint.choice walks through them
one after the other (joint.explore)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import PlanError
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape, counts, layouts, sample_groups
from autopar.joint.timetables import SEARCHED, Kind
from autopar.pipeline.schedules import SCHEDULES
from autopar.recipes import roles
from autopar.recipes.free import space, spaces
from autopar.recipes.pipelines import PipelineRecipe
from autopar.recipes.roles import Role
from autopar.text import gibibytes, near, times

Used = tuple[Role, ...]
MOST_NAMED = 12  # meshes in a message
UNFILLED_GAIN = 0.05
"""Share of the least work (operators at their best rates, and starting them) by which it has to be less with fewer
microbatches than places: such pipelines wait more, and gain only by what each microbatch costs."""


@dataclass(frozen=True)
class Space:
    """A set of shapes, and what plans on them may do.

    roles_on    mesh of a place -> the role of each axis; None for a mesh that is not in the space
    kinds       the schedules, with numbers of stages per place
    axes        how many axes the mesh of a place has at most
    alone       whether one place with several microbatches is in the space (gradient accumulation)
    mesh        the only mesh in the space; None: the one of the request, or any if that names none
    deep        whether places have three axes also where two might do (`_needs_three`)
    """

    name: str
    roles_on: Callable[[tuple[int, ...]], Used | None]
    kinds: tuple[Kind, ...]
    axes: int
    alone: bool = False
    mesh: tuple[int, ...] | None = None
    deep: bool = False

    def shapes(self, context: SearchContext) -> list[Shape]:
        """All shapes of the space on the cluster that `context` is for, in order."""
        return sorted(
            shape
            for shape in self._all_shapes(context)
            if self._state_bytes(context, shape) <= context.mean_bytes(shape.places)
        )

    def none(self, context: SearchContext) -> str:
        """The text of an error: why the space has no shapes."""
        short = min(
            (
                (self._state_bytes(context, shape), context.mean_bytes(shape.places))
                for shape in self._all_shapes(context)
            ),
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

    def _all_shapes(self, context: SearchContext) -> Iterator[Shape]:
        """All shapes of the space, whether they fit in memory or not."""
        cluster, fixed = context.request.cluster, self.mesh or context.request.mesh
        found = [(1, mesh) for mesh in spaces(cluster, context.whole.cuts_samples)] if self.alone else []
        found += self.layouts(context)
        for places, mesh in dict.fromkeys(found):
            yield from (
                Shape(places, mesh, m) for m in self._microbatches(context, places, mesh) if fixed in (None, mesh)
            )

    def layouts(self, context: SearchContext) -> list[tuple[int, tuple[int, ...]]]:
        """All (places, mesh of a place) with two or more places for which there are enough pieces. Most places have no
        need of a third axis, and to search all of them would take two to three times as long."""
        found = layouts(context.request.cluster, self.axes, context.pieces // self.least_stages)
        if self.deep or all(len(mesh) < 3 for _, mesh in found):
            return found
        needs = partial(_needs_three, context, roles.expert_counts(context.whole.program))
        return [(places, mesh) for places, mesh in found if len(mesh) < 3 or needs(mesh)]

    @property
    def least_stages(self) -> int:
        """How many stages a place has at least."""
        return min(kind.virtual or 2 for kind in self.kinds)

    def _microbatches(self, context: SearchContext, places: int, mesh: tuple[int, ...]) -> Iterator[int]:
        """The numbers of microbatches with which these places and this mesh are in the space: at least half as many as
        there are places. With fewer than places some of these always wait: only where that spares UNFILLED_GAIN of the
        least work, as starting operators is much of it. Where the batch does not suffice for as many as there are
        places, each place has to be one node: larger places, of which there are fewer, have collectives between
        nodes."""
        used = self.roles_on(mesh)
        if used is None:
            return
        if all(SCHEDULES[kind.schedule].name == "naive" for kind in self.kinds):
            yield 1
            return
        if context.sharable:
            return
        groups = sample_groups(context.gm, context.batch)
        # ranks that cut any input cut groups, too: of these all axes are taken for such
        grouped = groups < context.batch
        ways = math.prod(n for n, role in zip(mesh, used, strict=True) if grouped or role in roles.BY_SAMPLE)
        filling, half = (
            [m for m in counts(groups, max(2, n)) if groups % (m * ways) == 0] for n in (places, -(-places // 2))
        )
        few = [m for m in half if m < places]
        if filling:
            work_s = partial(context.work(places).step_s, context.request.cluster.devices, places)
            yield from (m for m in few if work_s(m) < work_s(filling[0]) * (1 - UNFILLED_GAIN))
            yield from filling
        elif math.prod(mesh) == context.request.cluster.levels[-1].size:
            yield from few

    def _state_bytes(self, context: SearchContext, shape: Shape) -> float:
        """Bytes per device of weights, gradients and optimizer state alone, cut as evenly as the roles allow."""
        used = self.roles_on(shape.mesh) or ()
        return context.rest_bytes / (
            shape.places * math.prod(n for n, role in zip(shape.mesh, used, strict=True) if role is not roles.data)
        )


def _needs_three(context: SearchContext, experts: Collection[int], mesh: tuple[int, ...]) -> bool:
    """Whether a mesh of three axes may do what none of two can: its innermost axis lies in a node, and the middle one
    leaves it (else they might be one); and there are fewer samples than nodes, or the outer two axes as one do not
    divide `experts` that the middle one divides."""
    outer, middle, inner = mesh
    node, devices = context.request.cluster.levels[-1].size, context.request.cluster.devices
    if not inner <= node < middle * inner:
        return False
    return context.batch * node < devices or any(n % middle == 0 and n % (outer * middle) for n in experts)


def _anything(mesh: tuple[int, ...]) -> Used:
    """The roles of the axes of a place in the free search: every split is allowed."""
    return (roles.nothing,) if mesh == (1,) else space(mesh)


SEARCH = Space("search", _anything, SEARCHED, axes=3, alone=True)
"""Several microbatches, on one place or more."""

NAIVE = Space("naive", _anything, (Kind("naive"),), axes=3)
"""One microbatch on several places, which run one after the other: where every microbatch costs much to start, or the
batch cannot be cut into any."""

FORWARD = replace(SEARCH, kinds=(Kind("gpipe"), Kind("looped_bfs", 2)))
"""SEARCH for inference, which runs all microbatches through a stage before the next one, whatever the schedule
(pipeline.orders.lines_of)."""

FREE = (SEARCH, NAIVE)
"""The spaces of the free search. Each named pipeline is part of one of them."""


def of_recipe(recipe: PipelineRecipe) -> Space:
    """The space of a named pipeline, which leaves the shape open. Raises PlanError for an unknown schedule."""
    if recipe.schedule not in SCHEDULES:
        raise PlanError(
            f"recipe {recipe.name}: schedule is {recipe.schedule!r}, wanted one of "
            f"{', '.join(SCHEDULES)}{near(recipe.schedule, SCHEDULES)}"
        )
    virtual = SCHEDULES[recipe.schedule].virtual or recipe.virtual
    return Space(recipe.name, recipe.roles_on, (Kind(recipe.schedule, virtual),), len(recipe.roles))


def asked(recipe: PipelineRecipe, context: SearchContext) -> Space:
    """The space of a named pipeline, restricted to the mesh of the request, if that names one. Axes of size 1 are left
    out, with their roles.

    Raises PlanError, with the meshes that are possible, where there are no stages on places of that mesh.
    """
    mesh, found = context.request.mesh, replace(of_recipe(recipe), deep=True)
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
    """The text of an error: why places of a pipeline cannot have `mesh`, and which meshes are `possible`."""
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
