"""What a step can gain at most by what goes to the host: what it costs to find as much memory on the device, by running blocks again.

A plan on the host that keeps something blocks could run again for is, with all of it on the device, a plan too: as many blocks more are run again as
make room for what comes back. That takes

    (seconds of running all blocks again) * (bytes that come back) / (bytes that running all of them again frees)

all of them for the whole step, cut evenly over devices, with as many microbatches of each block in flight as there are places. None of it is so fast
on a device as at the best rates: SLACK. Where the search on devices has found the best there is, a plan on the host is no faster than
that by more than this, less what the update takes longer there. Plans that keep nothing more than that are not so bounded.
"""

from __future__ import annotations

import math

from autopar.joint.inner import Inner
from autopar.joint.shapes import Shape

SLACK = 2.0


def least_s(there: Inner, shape: Shape, level: str) -> float:
    """Seconds that no step on `shape` beats with blocks run again at `level` where memory wants it and on the host what `there` has there; 0 where
    that is not known."""
    here, levels = there.on_devices, there.whole.open_levels
    if here is None or math.isinf(here.best_s):
        return 0.0
    deepest, devices = levels[-1], here.request.cluster.devices
    back_bytes = (here.rest_bytes - there.rest_bytes) / devices
    room = {each: _freed_bytes(here, shape, each, deepest) for each in levels[:levels.index(level) + 1]}
    if level == deepest or back_bytes > room[level]:
        return 0.0
    dearest = max((_work_s(here, deepest) - _work_s(here, each)) / nbytes for each, nbytes in room.items())
    return here.best_s - SLACK * dearest * back_bytes + there.update_s - here.update_s


def _freed_bytes(here: Inner, shape: Shape, level: str, deepest: str) -> float:
    """Bytes of each device that running all blocks again at `deepest` frees, rather than at `level`."""
    whole = Shape(1, (here.request.cluster.devices,), 1)
    flying = min(shape.places, shape.microbatches) / shape.microbatches
    return flying * (here.held_bytes(whole, level) - here.held_bytes(whole, deepest))


def _work_s(here: Inner, level: str) -> float:
    """Seconds of a step's least work with all blocks run again at `level`."""
    return here.work(1, level).step_s(here.request.cluster.devices, 1, 1)
