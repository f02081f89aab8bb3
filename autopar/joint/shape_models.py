"""Building the Problems of a shape: for each kind of place one of a microbatch, and one of what happens once per step.
Called by SearchContext.models (choices still open) and joint.parted_graph (choices fixed)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cluster import Places
from autopar.joint.place_kinds import Ground, Weights
from autopar.joint.shape_problems import Mixed, Models
from autopar.joint.shapes import Shape
from autopar.planner import Planner
from autopar.problem.build import Decisions, Frame, rested
from autopar.problem.clusters import Joint
from autopar.problem.step_shares import ForwardPrices, MicroPrices, StepPrices
from autopar.recipes.roles import Role, scattering

if TYPE_CHECKING:
    from autopar.joint.search_context import SearchContext


def open_choices(context: SearchContext, shape: Shape, used: tuple[Role, ...]) -> Models:
    """The Problems of `shape` with the role `used` on each mesh axis. Raises InfeasibleError where sizes and roles
    leave some operator without a choice."""
    if context.on_devices is not None and not context.request.cluster.parts:
        return _hosted(context, context.on_devices.models(shape, used))
    here, ground = context.planner(shape.microbatches), context.grounds(shape)[0]
    free = scattering(used) if shape.microbatches > 1 else used
    joints = [here.joints(role, n) for role, n in zip(free, shape.mesh, strict=True)]
    frame = Frame.of(here.program, here.clusters, joints, shape.mesh)
    return _of_kinds(context, here, frame, ground, shape)


def fixed_choices(context: SearchContext, shape: Shape, ground: Ground, decisions: Decisions) -> Models:
    """The Problems of `shape` on the places of `ground` in which every choice is fixed by `decisions`."""
    here = context.planner(shape.microbatches)
    joints = [
        [[Joint(tuple([decisions[op.name][axis] for op in cluster.members]))] for cluster in here.clusters]
        for axis in range(len(shape.mesh))
    ]
    return _of_kinds(context, here, Frame.of(here.program, here.clusters, joints, shape.mesh), ground, shape)


def _of_kinds(context: SearchContext, here: Planner, frame: Frame, ground: Ground, shape: Shape) -> Models:
    """The Problems of all kinds of places."""
    kinds = sorted(set(ground.kinds))
    each = [_priced(context, here, frame, ground.places, ground.kinds.index(kind), shape) for kind in kinds]
    return each[0] if len(each) == 1 else Mixed.of(each, _weights(context, ground, kinds))


def _weights(context: SearchContext, ground: Ground, kinds: list[int]) -> Weights:
    """How much each kind of place counts in the mean of their Problems (joint.place_kinds)."""
    paces = [context.pace(ground.places.device(ground.kinds.index(kind))) for kind in kinds]
    return Weights.of([ground.kinds.count(kind) for kind in kinds], paces)


def _priced(context: SearchContext, here: Planner, frame: Frame, at: Places, place: int, shape: Shape) -> Models:
    """The Problems of the kind of place that `place` is of."""
    mesh, device, settings = at.mesh(place), at.device(place), context.request.settings
    kernels, ahead = context.kernels(here, device)
    bucket = context.whole.program.bucket_bytes
    prices = (
        MicroPrices(mesh, device, settings, kernels, shape.microbatches, bucket_bytes=bucket),
        StepPrices(mesh, device, settings, kernels, bucket_bytes=bucket),
    )
    micro, once = (frame.priced(each, context.limit_bytes, str(shape)) for each in prices)
    return Models(micro, once, ForwardPrices(mesh, device, settings, ahead))


def _hosted(context: SearchContext, models: Models) -> Models:
    """`models` with offloading, which only changes what happens once per step."""
    once = models.once.prices
    prices = type(once)(once.mesh, once.device, context.request.settings, once.kernels, bucket_bytes=once.bucket_bytes)
    return replace(models, once=rested(models.once, prices))
