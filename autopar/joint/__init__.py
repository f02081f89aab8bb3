"""The joint search behind `autopar.compile`: number of stages, schedule, microbatches and the layouts of each place,
priced together; and a proven lower bound on the step of any plan. `plan` is the entry point.

What is searched:
    shapes            a shape: number of places, mesh of a place, microbatches
    spaces            the shapes, roles and timetables that the search or a named pipeline may use
    timetables        a schedule with a number of stages per place
    place_kinds       places on different kinds of devices

What is made of a shape:
    search_context    all Problems and results of one graph, made when first asked for
    shared_results    results that contexts share which differ in memory limit, recipe or offloading
    shape_models      builds the Problems of a shape
    shape_problems    the Problems of a shape, and a solution with its costs per piece
    sends             what a pipeline waits for its sends, in its Problem
    staging           cuts a solution into stages, times the step and counts its memory
    stage_times       seconds of each stage, and of the sends between stages
    floors            lower bounds of a shape, before any Problem of it is solved
    spare_room        memory that runs take beyond the sum of pieces, left free by glances
    pricing           the best plan of a shape: solved, then cut and timed under every timetable
    ways              the fastest of some ways to run a solution, the simplest of some results
    scattering        plans that scatter gradients after every microbatch
    kept_results      which results blocks keep that are run again
    stage_counts      other numbers of stages per place
    pipeline_honing   descent on the price of the whole step
    own_layouts       different layouts for each place
    parted_graph      the graph of such a plan, its runs of blocks divided into parts

The search:
    explore           the walk through the shapes of a space
    walk_limits       how far that goes
    choice            the fastest plan of one stage or of several, over all spaces
    offloading        plans with parameters and optimizer state on the host
    offload_gain      an upper bound of what a step gains by offloading
    one_part          the whole cluster compared with one part of it
    pareto            the frontier of step time against memory

The proof:
    prove             a lower bound on the step of all plans, from claims that are refined
    background_proof  the proof in a second process while the search runs
    claim_board       the claims in memory that both processes share
    shape_bounds      lower bounds of the plans of one shape
    weighing          weights of these bounds for one timetable
    relaxed           the Lagrangian relaxation of a step: a Problem with additive costs
    block_chains      reshards between blocks that may have layouts of their own, divided between these
    relaxed_steps     relaxed steps of one stage, of a timetable and of one place
    relaxed_bounds    lower bounds of relaxed steps
    relaxed_solving   a lower bound of a relaxed step at given dual prices
    price_polytope    the valid dual prices, as rows of a linear program
    cutting_planes    the dual prices of the highest bound, by cutting planes
    wait_cases        branch and bound over how long passes wait for collectives
    remat_bounds      lower bounds of what running blocks again costs
    memory_bounds     lower bounds of one shape by what its memory leaves room for, in little time
    effort            limits on rounds and cases
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.asked_search import check_mesh
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
"""The note of a plan whose search took more than SEARCH_SHARE of its time, and whose background proof had found nothing
by then."""

SEARCH_SHARE = 2 / 3
"""Share of the time limit, since a proof takes about half as long as the search. After a search that took more than
this, the bound is what the background proof has found so far."""

PROOF_SHARE = 0.25
"""Share of the time limit by which a proof that has found nothing may go on behind the limit, until it has; where it
still has not, the plan has the note UNPROVEN."""


def plan(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """The best plan of a captured graph, of one stage or several, with offloading to the host where devices are short
    of memory. `about` fills the Plan's fields model, graph_hash, source and notes.

    Raises InfeasibleError when nothing fits at all, PlanError for what cannot be asked for.
    """
    return fastest(SearchContext(gm, hints, request), **about)


def fastest(context: SearchContext, **about: Any) -> Plan:
    """As `plan`, within the memory limit of `context`."""
    if context.request.recipe is None:  # before another process looks at that mesh
        check_mesh(context.request)
    with BackgroundProof(context) as proof:
        context.answered, context.quick_s = proof.know, proof.quick_s
        made = compared(context, anywhere(context, **about), best)
        if context.request.recipe is not None:
            return made
        made = replace(made, notes=(*made.notes, *_indivisible_batch(context)))
        return made if _without_proof(context, made) else _with_bound(context, made, proof)


def anywhere(context: SearchContext, **about: Any) -> Plan:
    """The fastest plan within the memory limit of `context`, without a proof of all plans. State is offloaded to the
    host where the recipe says so, where nothing fits otherwise, or where the step is faster. Raises as `plan`."""
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
    """`made`, a plan within the memory limit of `context`, with a lower bound: `bound_s`, which holds for all plans
    within that limit or a larger one, or a higher one where the request wants a proof. Plans of a named recipe are
    returned as they are."""
    if context.request.recipe is not None or _without_proof(context, made):
        return made
    step_s = made.predicted.step_s
    proven = proven_s(context, step_s, _one_stage_mesh(made)) if context.request.prove else 0.0
    return replace(made, predicted=replace(made.predicted, bound_s=min(step_s, max(bound_s, proven))))


def _without_proof(context: SearchContext, made: Plan) -> bool:
    """Whether the bound of `made` stays the least work: proofs for inference are of one stage and one microbatch."""
    return made.pipelined and not context.request.settings.training


def _one_stage_mesh(made: Plan) -> tuple[int, ...] | None:
    """The mesh of a plan of one stage; None for a pipeline."""
    return tuple(made.mesh) if len(made.stages) == 1 else None


def _indivisible_batch(context: SearchContext) -> Iterator[str]:
    """A note where the batch and the number of devices have no common divisor, so that samples cannot be split."""
    batch, devices = context.batch, context.request.cluster.devices
    if batch > 1 and devices > 1 and math.gcd(batch, devices) == 1:
        yield (
            f"a batch of {batch} has no divisor in common with {devices} devices, so that no axis of a mesh splits its "
            f"samples: use a batch of {divisible(batch, devices)}"
        )


def _with_bound(context: SearchContext, made: Plan, proof: BackgroundProof) -> Plan:
    """`made` with the lower bound of the proof, which holds for plans as they are priced. The search's own bound holds
    only for the linear prices of its Problems."""
    timer, step_s, mesh, notes = context.timer, made.predicted.step_s, _one_stage_mesh(made), made.notes
    if context.request.prove:
        bound_s = proven_s(context, step_s, mesh)
    else:
        late = timer.left_s < timer.limit_s * (1 - SEARCH_SHARE)
        bound_s = proof.proven_s(
            step_s, mesh, -math.inf if late else timer.ends_at, timer.ends_at + PROOF_SHARE * timer.limit_s
        )
        notes = (*notes, UNPROVEN) if late and not proof.looked else notes
    return replace(made, notes=notes, predicted=replace(made.predicted, bound_s=bound_s))
