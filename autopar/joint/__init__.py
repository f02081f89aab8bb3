"""The joint search: one stage or several, which schedule, how many microbatches, and what a place does, priced
together.

    shapes            places, mesh of a place, microbatches
    spaces            what a search or a named pipeline may have
    timetables        schedule, and stages per place
    place_kinds       places on unlike devices
    shape_problems    the Problems of one shape, and a solution
    search_context    all that is made of one graph, when first asked for
    shared_results    what contexts with other limits, recipes or offloading share
    staging           one shape cut into stages, timed, its memory counted
    pricing           what a shape comes to
    kept_results      what blocks that are run again keep
    pipeline_honing   choices honed by the price of the whole step
    own_layouts       layouts of its own for each place
    parted_graph      such places as one graph
    explore           the walk through a space
    choice            one stage or several, over all spaces
    one_part          one part of the cluster against all of it
    offloading        parameters and optimizer state on the host
    offload_gain      what a step can gain there at most
    pareto            step time against memory
    prove             what no plan of all these is faster than
    shape_bounds      the same of one shape
    background_proof  a proof while the search goes on
    claim_board       claims that two processes look at
    relaxed           a step at prices of what hides
    relaxed_steps     what it is given: passes and memory
    relaxed_solving   what is proven at some prices
    price_polytope    which prices there are
    cutting_planes    the prices that prove most
    wait_cases        bounds by how long passes wait
    remat_bounds      what running blocks again takes at least
    effort            how closely a bound is looked for
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.errors import InfeasibleError
from autopar.joint import offloading
from autopar.joint.background_proof import BackgroundProof
from autopar.joint.choice import best
from autopar.joint.one_part import compared
from autopar.joint.prove import proven_s
from autopar.joint.search_context import SearchContext
from autopar.layout import divisible
from autopar.plan import Plan
from autopar.recipes.offload import OFFLOADS
from autopar.request import Request

UNPROVEN = (
    "the gap is to the least work there is, with nothing sent: a longer time limit, or a proof of all shapes "
    "(--prove), says more"
)
"""Where the search took all of its time, and nobody has looked at anything beside it."""

MOST = 2 / 3
"""Of the time limit: a proof takes half as long as the search that it is for, or about so. Behind a longer search it
ends with what was looked at beside that, if anything was."""


def plan(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """As `onestage.plan`, with stages and microbatches, and on the host where devices are short of memory.

    Raises InfeasibleError when nothing fits at all, PlanError for what cannot be asked for.
    """
    return fastest(SearchContext(gm, hints, request), **about)


def fastest(context: SearchContext, **about: Any) -> Plan:
    """As `plan`, for the memory of `context`."""
    with BackgroundProof(context) as proof:
        context.answered = proof.know
        made = compared(context, anywhere(context, **about), best)
        if context.request.recipe is not None:
            return made
        return _proven(context, replace(made, notes=(*made.notes, *_unsplit(context))), proof)


def anywhere(context: SearchContext, **about: Any) -> Plan:
    """The fastest plan for the memory of `context`, on the host where that is asked for, faster, or all that fits.
    Raises as `plan`."""
    if context.request.recipe in OFFLOADS:
        return offloading.by_recipe(context, about)
    free = offloading.may(context.request)
    try:
        made = best(context, **about)
    except InfeasibleError as error:
        if not free:
            raise
        return offloading.instead(context, error, about)
    return offloading.or_faster(context, made, about) if free else made


def with_proof(context: SearchContext, made: Plan, bound_s: float) -> Plan:
    """`made`, for the memory of `context`, with what is proven of all plans for that or more memory: `bound_s`, or as
    close as it gets where that is asked for. Nothing is of a recipe."""
    if context.request.recipe is not None:
        return made
    step_s = made.predicted.step_s
    proven = proven_s(context, step_s, _flat(made)) if context.request.prove else 0.0
    return replace(made, predicted=replace(made.predicted, bound_s=min(step_s, max(bound_s, proven))))


def _flat(made: Plan) -> tuple[int, ...] | None:
    """The mesh of a plan of one stage."""
    return tuple(made.mesh) if len(made.stages) == 1 else None


def _unsplit(context: SearchContext) -> Iterator[str]:
    """What is to be said of a batch of which no number of ranks that the devices come in can have equal parts."""
    batch, devices = context.batch, context.request.cluster.devices
    if batch > 1 and devices > 1 and math.gcd(batch, devices) == 1:
        yield (
            f"a batch of {batch} has no divisor in common with {devices} devices, so that no axis of a mesh splits its "
            f"samples: use a batch of {divisible(batch, devices)}"
        )


def _proven(context: SearchContext, made: Plan, proof: BackgroundProof) -> Plan:
    """`made` with what is proven of all plans as they are priced; what the search itself has proven is of Problems."""
    timer, step_s, mesh, notes = context.timer, made.predicted.step_s, _flat(made), made.notes
    if context.request.prove:
        bound_s = proven_s(context, step_s, mesh)
    else:
        late = timer.left_s < timer.limit_s * (1 - MOST)
        bound_s = proof.proven_s(step_s, mesh, -math.inf if late and proof.looked else timer.ends_at)
        notes = (*notes, UNPROVEN) if late and not proof.looked else notes
    return replace(made, notes=notes, predicted=replace(made.predicted, bound_s=bound_s))
