"""The choice between plans of one stage and pipelines: the fastest plan within the memory limit of a SearchContext,
over its spaces one after the other. Called by joint.anywhere (`best`) and joint.offloading (`staged`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar import bestfirst, onestage
from autopar.cluster import Cluster
from autopar.decisions import rule_notes, tiling_notes
from autopar.errors import InfeasibleError
from autopar.joint.background_proof import BackgroundProof
from autopar.joint.explore import PRICE_TOLERANCE, Explorer
from autopar.joint.inside import cut_inside
from autopar.joint.own_layouts import each_apart
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import FORWARD, FREE, NAIVE, Space, asked, of_recipe
from autopar.joint.staging import Found
from autopar.joint.walk_limits import NEAR, NEARER
from autopar.plan import Alternative, Plan, Predicted
from autopar.recipes.pipelines import PIPELINES
from autopar.text import seconds, times


def best(context: SearchContext, **about: Any) -> Plan:
    """The fastest plan within the memory limit of `context`. Of inference it is one of one stage and one microbatch if
    any of these fits, as no price has what it takes to tell outputs to all places. Raises InfeasibleError when nothing
    fits at all."""
    request, timer = context.request, context.timer
    if request.recipe in PIPELINES:
        return staged(context, [asked(PIPELINES[request.recipe], context)], None, about)
    flat, failed = None, None
    several = request.recipe is None and request.search == "ilp"
    competes = several and request.settings.training
    free = FREE if request.settings.training else (FORWARD, NAIVE)
    begun = [Explorer(context, space, math.inf, timer.ends_at) for space in free]
    first = begun[0]
    if competes and context.on_devices is None and not request.cluster.parts:  # where something is proven of pipelines
        first.quick_s = context.quick_s or BackgroundProof(context).quick_s
    if competes and request.cluster.parts:  # in lockstep all ranks are as slow as the slowest
        first.begin()
    elsewhere = (
        bestfirst.Elsewhere(lambda known_s: NEARER * _probed(begun, known_s), first.searched, context.answered)
        if competes
        else None
    )
    try:
        flat = onestage.plan_with(
            context.whole.anew(replace(request, memory_bytes=context.limit_bytes)), elsewhere, timer, **about
        )
    except InfeasibleError as error:
        failed = error
    if not several and failed is not None:
        raise failed
    if flat is not None and not competes:
        return flat
    named = [recipe for recipe in PIPELINES.values() if recipe.fits(context.whole.program)]
    spaces = [*free, *(map(of_recipe, named) if competes else ())]
    try:
        return staged(context, spaces, flat, about, begun)
    except InfeasibleError as error:
        if failed is None:
            raise
        raise InfeasibleError(f"{failed}\nin pipeline stages: {error}", missing_bytes=failed.missing_bytes) from error


def _probed(walks: Sequence[Explorer], known_s: float) -> float:
    """The fastest step known after the starts of all walks were visited, `known_s` included. Steps are longer than
    their floors by at least as much in the walks that come later as in those before."""
    longer = 1.0
    for walk in walks:
        known_s = walk.probe(known_s, longer)
        longer = min((found.step_s / walk.floors[shape] for shape, found in walk.fit.items()), default=longer)
    return known_s


def staged(
    context: SearchContext,
    spaces: Sequence[Space],
    flat: Plan | None,
    about: Mapping[str, Any],
    begun: Sequence[Explorer] = (),
    known_s: float = float("inf"),
    reach: float = float("inf"),
) -> Plan:
    """The best of `flat`, a plan of one stage and one microbatch, and of all plans in `spaces`.

    The free spaces, which come first, contain the others, so that what is proven there holds for these; `begun` are
    walks through some spaces whose results are reused. `reach` as in Explorer. Raises InfeasibleError where there is no
    `flat` and nothing is faster than `known_s`.
    """
    known_s = min(known_s, flat.predicted.step_s if flat is not None else float("inf"))
    deadline = context.timer.ends_at
    best: Found | None = None
    tried: list[Alternative] = []
    why: list[str] = []
    walks: list[Explorer] = []
    for space in spaces:
        wider = context.roomy if space in FREE else _proven(walks)
        before = next((walk for walk in begun if walk.space == space), None) or Explorer(
            context, space, known_s, deadline
        )
        known = known_s < math.inf or before.fit  # what fits at a glance is solved, whatever the time
        until = deadline if known else max(deadline, time.monotonic()) + context.timer.limit_s
        walk = before.again(known_s, until, wider, reach)
        walks.append(walk)
        found = _searched(context, walk, known_s)
        why += walk.why[:3]
        tried += _alternatives(walk)
        if found is not None and found.step_s < known_s * (1 - PRICE_TOLERANCE):
            best, known_s = found, found.step_s
            context.answered(known_s)
    context.timer.hurried |= any(walk.hurried for walk in walks)
    if not context.request.settings.offload:
        for walk in walks:
            context.roomy.update(walk.pricing.roomy if walk.space in FREE else {})
    least_s = min(walk.least_floor_s for walk in walks)
    bound_s = min(least_s, _bound_s(context, flat)) if context.request.recipe is None else 0.0
    if best is not None and _divides_blocks(best.plan):  # bounds of shapes are of blocks that are whole
        bound_s = min(bound_s, _bound_s(context, None))
    if best is not None:
        made = _finished(context, best, flat, tried, bound_s, about)
    elif flat is not None:
        made = _one_stage_is_best(flat, tried, bound_s, context.request.settings.offload)
    else:
        raise _none_fits(context, spaces, known_s, "; ".join(why[-3:]) or walks[0].reason)
    return replace(made, notes=context.timer.noted((*made.notes, *_simpler_plan_note(made, walks))))


def _proven(walks: Sequence[Explorer]) -> dict[Shape, float]:
    """Shape -> lower bound in seconds, as walks through free spaces have proven it."""
    return {shape: bound_s for walk in walks if walk.space in FREE for shape, bound_s in walk.proven.items()}


def _searched(context: SearchContext, walk: Explorer, known_s: float) -> Found | None:
    """The result of a walk, refined; then of going on further from what is best, in the time that is left."""
    first = walk.run()
    best = _refined(context, first, walk.fit.values(), known_s)
    if best is None or context.timer.late:
        return best
    walk.far, walk.known_s = True, min(known_s, best.step_s)
    other = walk.run()
    if other is first or other is None:
        return best
    return min(best, _refined(context, other, walk.fit.values(), walk.known_s), key=lambda found: found.step_s)


def _refined(context: SearchContext, found: Found | None, others: Iterable[Found], known_s: float) -> Found | None:
    """`found`, or the same with different layouts for each place, or one of it and the other pipeline among `others`
    that would be fastest with even places with stages that end inside of blocks, where that is faster. It is only tried
    where the result may be faster than `known_s`."""
    if found is None or context.request.recipe is not None or context.timer.skips():
        return found
    ways = [found]
    if found.step_s < known_s * _own_layouts_factor(context):
        ways += [each_apart(context, found), cut_inside(context, found)]
    pipelines = [other for other in others if other.table.stages > 1 and other is not found]
    other = min(pipelines, key=_even_s, default=None)
    if other is not None and _even_s(other) < min(known_s, *(way.step_s for way in ways)):
        ways.append(cut_inside(context, other))
    return min(ways, key=lambda made: made.step_s)


def _even_s(found: Found) -> float:
    """Seconds of a step if all places were as busy as on average: about what cuts inside of blocks can reach."""
    each = [sum(c.micro_s for c in pieces.costs) for pieces in found.chosen.pieces]
    mean_s = found.shape.microbatches * sum(each[kind] for kind in found.ground.kinds) / found.shape.places**2
    return found.step_s - max(0.0, found.busy_s - mean_s)


def _divides_blocks(plan: Plan) -> bool:
    """Whether stages of a plan end inside of blocks."""
    return any(isinstance(begin, str) for parts in plan.parted.values() for begin in parts.values())


def _none_fits(context: SearchContext, spaces: Sequence[Space], known_s: float, why: str) -> InfeasibleError:
    """The error where no plan of `spaces` fits, or none is faster than `known_s`."""
    faster = f" and is faster than {seconds(known_s)}" if known_s < math.inf else ""
    longer = (
        f"; with a longer time limit than {context.timer.limit_s:g} s there may be one that does"
        if context.timer.hurried and not faster
        else ""
    )
    names = ", ".join(space.name for space in spaces)
    return InfeasibleError(f"none of {names} fits {context.request.cluster.label}{faster}: {why}{longer}")


def _own_layouts_factor(context: SearchContext) -> float:
    """The factor on the best known step up to which it is tried to give each place of a pipeline its own layouts. That
    gains a few per cent where places are alike, and can gain much where devices differ."""
    return NEAR if context.request.cluster.parts else NEARER


def _alternatives(walk: Explorer) -> list[Alternative]:
    """The entries for Plan.alternatives: for each number of places the best plan that a walk found, or the reason why
    it found none."""
    best: dict[int, Found] = {}
    for shape, found in walk.fit.items():
        if shape.places not in best or found.step_s < best[shape.places].step_s:
            best[shape.places] = found
    if not best:
        return [Alternative(walk.space.name, (walk.context.request.cluster.devices,), None, None, walk.reason)]
    return [
        Alternative(walk.space.name, found.plan.grid, found.step_s, found.memory_bytes, how=found.plan.how)
        for found in best.values()
    ]


def _bound_s(context: SearchContext, flat: Plan | None) -> float:
    """A lower bound in seconds on plans of one stage and one microbatch: what their search has proven, else the least
    work."""
    if flat is not None and flat.predicted.bound_s > 0:
        return flat.predicted.bound_s
    return context.work(1).step_s(context.request.cluster.devices, 1, 1)


def _one_stage_is_best(flat: Plan, tried: Sequence[Alternative], bound_s: float, held: str) -> Plan:
    """`flat` as the best of all plans. Its bound becomes the one that holds for all plans; a tighter one for plans of
    one stage, with the same `held` on the host, goes into a note."""
    alone_s, notes = flat.predicted.bound_s, flat.notes
    if alone_s > bound_s:
        of = "of plans of one stage and one microbatch" + f" with {held} on the host" * bool(held)
        notes = (*notes, f"{of} none is faster than {seconds(alone_s)} by the linear prices of their Problem")
    predicted = replace(flat.predicted, bound_s=min(bound_s, flat.predicted.step_s))
    return replace(flat, alternatives=(*flat.alternatives, *tried), notes=notes, predicted=predicted)


def _simpler_plan_note(made: Plan, walks: Sequence[Explorer]) -> Iterator[str]:
    """A note where a pipeline is faster than the chosen plan, which is simpler, by less than prices tell apart."""
    step_s = made.predicted.step_s
    other = min((found for walk in walks for found in walk.settled), key=lambda found: found.step_s, default=None)
    if other is not None and other.step_s < step_s:
        how, others = (f"{times(plan.grid)}{', ' * bool(plan.how)}{plan.how}" for plan in (made, other.plan))
        yield (
            f"{how} ({seconds(step_s)}) rather than {others} ({seconds(other.step_s)}): prices do not tell "
            f"{100 * (step_s / other.step_s - 1):.2f} % apart"
        )


def _rank_order_note(asked: Cluster, plan: Plan) -> Iterator[str]:
    """A note where the plan has the parts of the cluster in another order than the user gave them."""
    parts = Cluster.from_dict(dict(plan.cluster)).parts
    if parts != asked.parts:
        yield (
            f"number the ranks in this order: {', then '.join(part.label for part in parts)}; the first stages are on "
            "the first ones"
        )


def _finished(
    context: SearchContext,
    best: Found,
    flat: Plan | None,
    tried: Sequence[Alternative],
    bound_s: float,
    about: Mapping[str, Any],
) -> Plan:
    """The pipeline `best` as a Plan with its prediction, notes and alternatives (those of `flat`, then `tried`)."""
    predicted = Predicted(
        best.step_s,
        best.memory_bytes,
        best.busy_s,
        max(0.0, best.step_s - best.busy_s),
        0.0,
        min(bound_s, best.step_s),
        best.places_bytes if best.table.places > 1 else (),
    )
    notes = (
        *about.get("notes", ()),
        *tiling_notes(best.program, best.plan),
        *rule_notes(context.whole.program, context.request.rules),
        *_rank_order_note(context.request.cluster, best.plan),
        *best.plan.notes,
    )
    if best.alike_s:
        notes = (
            *notes,
            f"places are laid out each in their own way; with all alike a step takes {seconds(best.alike_s)}",
        )
    if best.even_s:
        notes = (
            *notes,
            f"stages are as long as {best.table.kind.schedule} wants them; with the most even cuts a step takes "
            f"{seconds(best.even_s)}",
        )
    others = (*(flat.alternatives if flat is not None else ()), *tried)
    return replace(best.plan, predicted=predicted, alternatives=others, **{**about, "notes": notes})
