"""The most that a step can gain by offloading to the host: the cost of freeing as much device memory by
rematerialisation instead. Called by joint.pricing and joint.offloading.

Take a plan with offloading whose blocks keep results that could be computed again. Move everything back to the device
and run as many more blocks again as make room for it: that is a plan without offloading. It is slower in its forward
and backward by

    (seconds of running all blocks again) * (bytes that come back) / (bytes that running all of them again frees)

where each term is for the whole step, cut evenly over devices, with as many microbatches of each block in flight as
there are places. The seconds are counted at the device's best rates, which no real operator reaches; SLACK makes up for
that. If the search without offloading has found the best such plan, a plan with offloading gains at most this, less
what its update takes longer. Plans with offloading that keep nothing that could be computed again are not bounded by
this."""

from __future__ import annotations

import math

from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape

SLACK = 2.0


def least_s(there: SearchContext, shape: Shape, level: str) -> float:
    """A lower bound in seconds on steps on `shape` with the offloading of `there`, at a level of rematerialisation; 0
    where none is known."""
    here, levels = there.on_devices, there.whole.open_levels
    if here is None or math.isinf(here.best_s):
        return 0.0
    deepest, devices = levels[-1], here.request.cluster.devices
    back_bytes = (here.rest_bytes - there.rest_bytes) / devices
    room = {each: _freed_bytes(here, shape, each, deepest) for each in levels[: levels.index(level) + 1]}
    if level == deepest or back_bytes > room[level]:
        return 0.0
    dearest = max((_work_s(here, deepest) - _work_s(here, each)) / nbytes for each, nbytes in room.items())
    return here.best_s - SLACK * dearest * back_bytes + there.update_s - here.update_s


def _freed_bytes(here: SearchContext, shape: Shape, level: str, deepest: str) -> float:
    """Bytes of each device that running all blocks again at `deepest` frees, rather than at `level`."""
    whole = Shape(1, (here.request.cluster.devices,), 1)
    flying = min(shape.places, shape.microbatches) / shape.microbatches
    return flying * (here.held_bytes(whole, level) - here.held_bytes(whole, deepest))


def _work_s(here: SearchContext, level: str) -> float:
    """Seconds of a step's least work with all blocks run again at `level`."""
    return here.work(1, level).step_s(here.request.cluster.devices, 1, 1)
