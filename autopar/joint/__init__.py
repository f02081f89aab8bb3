"""The joint search: one stage or several, which schedule, how many microbatches, and what a place does, priced together.

    shapes       places, mesh of a place, microbatches          timetables   schedule and stages per place
    spaces       what a search or a named pipeline may have     kinds        places on unlike devices
    models       the Problems of one shape, and a solution      inner        all that is made of one graph, when first asked for
    laid         one shape cut, timed, its memory counted       pricing      what a shape comes to
    fuller       what blocks that are run again keep
    explore      the walk through a space                       best         one stage or several, over all spaces
    offloading   parameters and optimizer state on the host     worth        what a step can gain there at most
    frontier     step time against memory                       alone        one part of the cluster against all of it
    prove        what no plan of all these is faster than       bounded      the same of one shape
    beside       a proof while the search goes on               board        claims that two processes look at
    relaxed      a step at prices of what hides            cutting      the prices that prove most
    polytope     which prices there are                    cases        bounds by how long passes wait
    solving      what is proven at some prices             effort       how closely a bound is looked for
    counted      what both are given: passes and memory    again        what running blocks again takes at least
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.errors import InfeasibleError
from autopar.joint import offloading
from autopar.joint.alone import compared
from autopar.joint.beside import Beside
from autopar.joint.best import best
from autopar.joint.inner import Inner
from autopar.joint.prove import proven_s
from autopar.layout import divisible
from autopar.plan import Plan
from autopar.recipes.offload import OFFLOADS
from autopar.request import Request

UNPROVEN = "the gap is to the least work there is, with nothing sent: a longer time limit, or a proof of all shapes (--prove), says more"
"""Where the search took all of its time, and nobody has looked at anything beside it."""

MOST = 2 / 3
"""Of the time limit: a proof takes half as long as the search that it is for, or about so. Behind a longer search it ends with what was looked at beside that, if anything was."""


def plan(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """As `onestage.plan`, with stages and microbatches, and on the host where devices are short of memory.

    Raises InfeasibleError when nothing fits at all, PlanError for what cannot be asked for.
    """
    return fastest(Inner(gm, hints, request), **about)


def fastest(inner: Inner, **about: Any) -> Plan:
    """As `plan`, for the memory of `inner`."""
    with Beside(inner) as proof:
        inner.answered = proof.know
        made = compared(inner, anywhere(inner, **about), best)
        if inner.request.recipe is not None:
            return made
        return _proven(inner, replace(made, notes=(*made.notes, *_unsplit(inner))), proof)


def anywhere(inner: Inner, **about: Any) -> Plan:
    """The fastest plan for the memory of `inner`, on the host where that is asked for, faster, or all that fits. Raises as `plan`."""
    if inner.request.recipe in OFFLOADS:
        return offloading.by_recipe(inner, about)
    free = offloading.may(inner.request)
    try:
        made = best(inner, **about)
    except InfeasibleError as error:
        if not free:
            raise
        return offloading.instead(inner, error, about)
    return offloading.or_faster(inner, made, about) if free else made


def with_proof(inner: Inner, made: Plan, bound_s: float) -> Plan:
    """`made`, for the memory of `inner`, with what is proven of all plans for that or more memory: `bound_s`, or as close as it gets where that is asked for. Nothing is of a recipe."""
    if inner.request.recipe is not None:
        return made
    step_s = made.predicted.step_s
    proven = proven_s(inner, step_s, _flat(made)) if inner.request.prove else 0.0
    return replace(made, predicted=replace(made.predicted, bound_s=min(step_s, max(bound_s, proven))))


def _flat(made: Plan) -> tuple[int, ...] | None:
    """The mesh of a plan of one stage."""
    return tuple(made.mesh) if len(made.stages) == 1 else None


def _unsplit(inner: Inner) -> Iterator[str]:
    """What is to be said of a batch of which no number of ranks that the devices come in can have equal parts."""
    batch, devices = inner.batch, inner.request.cluster.devices
    if batch > 1 and devices > 1 and math.gcd(batch, devices) == 1:
        yield (f"a batch of {batch} has no divisor in common with {devices} devices, so that no axis of a mesh splits its samples: "
               f"use a batch of {divisible(batch, devices)}")


def _proven(inner: Inner, made: Plan, proof: Beside) -> Plan:
    """`made` with what is proven of all plans as they are priced; what the search itself has proven is of Problems."""
    timer, step_s, mesh, notes = inner.timer, made.predicted.step_s, _flat(made), made.notes
    if inner.request.prove:
        bound_s = proven_s(inner, step_s, mesh)
    else:
        late = timer.left_s < timer.limit_s * (1 - MOST)
        bound_s = proof.proven_s(step_s, mesh, -math.inf if late and proof.looked else timer.ends_at)
        notes = (*notes, UNPROVEN) if late and not proof.looked else notes
    return replace(made, notes=notes, predicted=replace(made.predicted, bound_s=bound_s))
