"""The whole of a cluster with several parts compared with one part of it: a slow part, or a slow network to it, may
slow the others down. Called by joint.fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint.place_kinds import distinct
from autopar.joint.search_context import SearchContext
from autopar.plan import Alternative, Plan
from autopar.text import seconds


def compared(context: SearchContext, made: Plan, best: Callable[[SearchContext], Plan]) -> Plan:
    """`made`, with the best plan of each part alone that may be as fast among the alternatives, and a note where one is
    faster. Each may take half of the time of the request. Nothing is compared where a recipe or a mesh was asked
    for."""
    request = context.request
    free = request.recipe is None and request.mesh is None and request.search == "ilp" and request.settings.training
    if not request.cluster.parts or not free:
        return made
    others, notes, step_s = list[Alternative](), list[str](), made.predicted.step_s
    for part in distinct(request.cluster):
        if context.whole.work_on(part.device).step_s(part.devices, 1, 1) >= step_s * (1 - PRICE_TOLERANCE):
            continue
        request.say(f"{part.label} alone")
        try:
            alone = best(
                SearchContext(
                    context.gm, context.hints, replace(request, cluster=part, time_limit_s=request.time_limit_s / 2)
                )
            )
        except InfeasibleError:
            continue
        found = alone.predicted
        others.append(Alternative(f"{part.label} alone", alone.grid, found.step_s, found.memory_bytes, how=alone.how))
        if found.step_s < step_s * (1 - PRICE_TOLERANCE):
            notes.append(
                f"{part.label} alone is faster, {seconds(found.step_s)}: the rest of the cluster is in its way"
            )
    return replace(made, alternatives=(*made.alternatives, *others), notes=(*made.notes, *notes))
