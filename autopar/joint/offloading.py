"""Plans with offloading: optimizer state rests on the host, or parameters and gradients too. Called by joint.anywhere.

They are made by name (recipes), where no other plan fits, and where they are faster than a plan that would be faster
itself if devices had more memory. They have one stage or several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar import onestage
from autopar.bestfirst import PRICE_TOLERANCE
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import offload_gain
from autopar.joint.choice import staged
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import FREE
from autopar.memory import hosts
from autopar.named_strategies import FULL, refused_meshes
from autopar.plan import Alternative, Plan
from autopar.problem.graph import Program
from autopar.problem.settings import OFFLOADED
from autopar.recipes import RECIPES
from autopar.recipes import offload as offloads
from autopar.recipes.offload import OFFLOADS
from autopar.request import Request
from autopar.text import gibibytes, seconds

WORDS = {"optimizer": "optimizer state rests", "parameters": "parameters, gradients and optimizer state rest"}


def by_recipe(context: SearchContext, about: Mapping[str, Any]) -> Plan:
    """The plan of an offloading recipe. Raises InfeasibleError where device or host memory is too small, PlanError
    where the cluster does not say what hosts have."""
    offload = OFFLOADS[str(context.request.recipe)]
    offloads.checked(offload.name, context.request.cluster, context.request.settings)
    there = context.hosted(offload.held)
    planner = there.whole.anew(replace(there.request, recipe=offload.base, memory_bytes=context.limit_bytes))
    refused_meshes(planner, replace(RECIPES[offload.base], name=offload.name))
    return _settled(there.whole.program, onestage.plan_with(planner, timer=there.timer, **about), "")


def may(request: Request) -> bool:
    """Whether the search considers offloading: it trains, recipe, search and offloading are left to it, and the cluster
    describes hosts with memory of their own (a CPU rank's memory is the host's)."""
    free = (
        request.recipe is None
        and request.search == "ilp"
        and request.settings.training
        and not request.settings.offload
    )
    return (
        free
        and request.cluster.device.kind != "cpu"
        and not request.cluster.parts
        and not offloads.unknown(request.cluster.device)
    )


def instead(context: SearchContext, failed: InfeasibleError, about: Mapping[str, Any]) -> Plan:
    """The best plan with offloading, where no other plan fits, as `failed` says. Raises InfeasibleError, with the text
    of `failed` and what offloading lacks, where none fits either."""
    context.request.say("nothing fits the devices: optimizer state on the host")
    context.restart()
    missing = (
        f"{gibibytes(failed.missing_bytes)} per device are missing"
        if failed.missing_bytes is not None
        else "memory is missing"
    )
    found, _, why = _fastest(context, math.inf, f", because nothing else fits: {missing}", about)
    if found is None:
        raise InfeasibleError(
            f"{failed}\nwith parameters, gradients and optimizer state on the host: {why}",
            missing_bytes=failed.missing_bytes,
        )
    return found


def or_faster(context: SearchContext, made: Plan, about: Mapping[str, Any]) -> Plan:
    """`made`, or a faster plan with offloading. One is only searched where `made` is short of memory, and where the
    least step with offloading is shorter."""
    step_s = context.best_s = made.predicted.step_s
    if not _short_of_memory(context, made):
        return made
    found, tried, _ = _fastest(context, step_s, f": {seconds(step_s)} with all of it on devices", about)
    if found is None:
        return replace(made, notes=context.timer.noted(made.notes), alternatives=(*made.alternatives, *tried))
    others = (
        *made.alternatives,
        *tried,
        Alternative(made.strategy, made.grid, step_s, made.predicted.memory_bytes, how=made.how),
    )
    proven = replace(found.predicted, bound_s=min(found.predicted.bound_s, made.predicted.bound_s))  # of all plans
    return replace(
        found, notes=context.timer.noted(found.notes), alternatives=(*found.alternatives, *others), predicted=proven
    )


def _short_of_memory(context: SearchContext, made: Plan) -> bool:
    """Whether offloading may make a faster plan than `made`: `made` runs blocks again or has several stages or
    microbatches, all of which save memory; or more memory would make a plan of one stage so much faster that it gains
    more than the update on the host takes longer."""
    if made.remat or made.places > 1 or made.microbatches > 1:
        return True
    devices, step_s = context.request.cluster.devices, made.predicted.step_s
    if devices * context.held_bytes(Shape(1, (devices,), 1), "none") <= FULL * context.limit_bytes:
        return False  # every device has room for all there is
    later_s = min(context.hosted(held).late_s for held in OFFLOADED[1:]) - context.update_s
    below_s = step_s * (1 - PRICE_TOLERANCE) - max(0.0, later_s)
    if context.work(1).step_s(devices, 1, 1) >= below_s or context.timer.skips():
        return False
    return onestage.faster_with_room(context.whole, below_s)


def _fastest(
    context: SearchContext, known_s: float, why: str, about: Mapping[str, Any]
) -> tuple[Plan | None, list[Alternative], str]:
    """The fastest plan with offloading that beats `known_s` (None: there is none), an Alternative for each kind of
    offloading that gives none, and the reason of the last one. `why` ends the note of the plan."""
    best: Plan | None = None
    tried: list[Alternative] = []
    reason = ""
    for held in OFFLOADED[1:]:
        there = context.hosted(held)
        open_ = [level for level in there.whole.open_levels if _least_s(there, level) < known_s * (1 - PRICE_TOLERANCE)]
        if not open_:
            continue
        if known_s < math.inf and context.timer.skips():
            tried.append(
                Alternative(f"{held} on the host", (context.request.cluster.devices,), None, None, context.timer.note)
            )
            continue
        context.request.say(f"short of memory: {WORDS[held]} on the host")
        try:
            made = _best(there, known_s, open_, about)
            best = _settled(there.program_of(made), made, why)
        except InfeasibleError as error:
            reason = str(error)
            tried.append(Alternative(f"{held} on the host", (context.request.cluster.devices,), None, None, reason))
            continue
        known_s = best.predicted.step_s
    return best, tried, reason


def _least_s(there: SearchContext, level: str) -> float:
    """A lower bound in seconds on a step with all blocks run again at `level`."""
    return there.work(1, level).step_s(there.request.cluster.devices, 1, 1) + there.late_s


def _best(there: SearchContext, known_s: float, open_: list[str], about: Mapping[str, Any]) -> Plan:
    """The best plan of one stage or several that beats `known_s`, with blocks run again at one of the levels `open_`.
    Raises InfeasibleError, which says what devices or hosts lack, where there is none."""
    planner = there.whole.anew(replace(there.request, memory_bytes=there.limit_bytes))
    alone = Shape(1, (there.request.cluster.devices,), 1)
    open_ = [level for level in open_ if offload_gain.least_s(there, alone, level) < known_s * (1 - PRICE_TOLERANCE)]
    flat, failed = None, None
    try:
        flat = (
            onestage.plan_with(planner, timer=there.timer, **about)
            if math.isinf(known_s)
            else onestage.beating(planner, known_s, open_, there.timer, **about)
        )
        _fitting(there.whole.program, flat)
    except InfeasibleError as error:
        flat, failed = None, error
    try:
        return staged(
            there,
            FREE,
            flat,
            about,
            known_s=known_s,
            reach=math.inf if flat is None and math.isinf(known_s) else 1.0,
        )
    except InfeasibleError as error:
        raise InfeasibleError(f"{failed}\nin pipeline stages: {error}") from error


def _settled(program: Program, made: Plan, why: str) -> Plan:
    """`made`, a plan with offloading, with a note that ends with `why`; its strategies get their names with offloading.
    Raises InfeasibleError where hosts have too little memory for it."""
    _fitting(program, made)
    host_bytes = max(hosts.of_places(program, made))
    note = (
        f"{WORDS[made.offload]} on the host, {'up to ' * (made.places > 1)}{gibibytes(host_bytes)} for each device{why}"
    )
    others = tuple(replace(other, name=_name(other.name, made.offload)) for other in made.alternatives)
    return replace(made, strategy=_name(made.strategy, made.offload), alternatives=others, notes=(*made.notes, note))


def _fitting(program: Program, made: Plan) -> None:
    """Raises InfeasibleError where hosts have too little memory for `made`."""
    offloads.fits(
        _name(made.strategy, made.offload), hosts.of_a_device(program, made), Cluster.from_dict(dict(made.cluster))
    )


def _name(strategy: str, held: str) -> str:
    """The name of `strategy` with `held` offloaded: that of the offloading recipe, if there is one."""
    named = [offload.name for offload in OFFLOADS.values() if (offload.base, offload.held) == (strategy, held)]
    return named[0] if named else f"{strategy}, {held} on the host"
