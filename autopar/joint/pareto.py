"""The frontier of step time against memory: the fastest plan for less and less memory, as long as one fits. Called by
`compile(..., pareto=True)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar import joint
from autopar.errors import InfeasibleError
from autopar.joint.search_context import SearchContext
from autopar.plan import Alternative, Plan
from autopar.recipes import RECIPES
from autopar.recipes.names import without_level
from autopar.recipes.offload import OFFLOADS
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from autopar.text import gibibytes

POINTS = 6
SHRINK = 0.7  # of the memory of the plan before


def frontier(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> list[Plan]:
    """Plans of which none is beaten in both step time and memory of devices, the fastest first; those on the host too,
    and recipes between what the search finds. Each may take `request.time_limit_s`. The first is the plan that there is
    without a frontier; what is proven of it is proven of those for less memory, and more where the request says so.

    Raises InfeasibleError when nothing fits the device, PlanError for what cannot be asked for.
    """
    context = SearchContext(gm, hints, request)
    found = [joint.fastest(context, **about)]
    while len(found) < POINTS:
        limit_bytes = SHRINK * found[-1].predicted.memory_bytes
        request.say(f"with {gibibytes(limit_bytes)}")
        context.restart()
        less = context.limited(limit_bytes)
        try:
            found.append(joint.with_proof(less, joint.anywhere(less, **about), found[0].predicted.bound_s))
        except InfeasibleError:
            break
    every = [*found, *between(context, found, about)]
    return unbeaten([replace(plan, alternatives=()) if plan is not found[0] else plan for plan in every])


def between(context: SearchContext, found: Sequence[Plan], about: Mapping[str, Any]) -> Iterator[Plan]:
    """The recipes that were priced along the way and are beaten by none of `found`, each on its mesh, as fast as it is
    with all the memory there is, and where it was priced at a level of rematerialisation, at that level too; what is
    proven of the first plan of `found` is proven of them."""
    for name, mesh, remat in dict.fromkeys(asked for row in _unbeaten_rows(found) for asked in _asked(row)):
        context.restart()
        asked = context.named(name, mesh)
        asked.request = replace(asked.request, remat=remat or asked.request.remat)
        made = joint.anywhere(asked, **about)
        bound_s = min(made.predicted.step_s, found[0].predicted.bound_s)
        yield replace(made, predicted=replace(made.predicted, bound_s=bound_s))


def _unbeaten_rows(found: Sequence[Plan]) -> Iterator[Alternative]:
    """What was priced along the way and is beaten by none of `found`."""
    for row in found[0].alternatives:
        if (
            row.step_s is not None
            and row.memory_bytes is not None
            and all(
                row.step_s < plan.predicted.step_s or row.memory_bytes < plan.predicted.memory_bytes for plan in found
            )
        ):
            yield row


def _asked(row: Alternative) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """What to ask for to get the plan of a row: recipe, mesh and level of rematerialisation ("": as the request has
    it). Nothing for a row of the search. With a level it is both: the row's blocks all run again, or as few as memory
    requires."""
    name, level = without_level(row.name)
    if name in PIPELINES:
        yield name, row.mesh[1:], ""
    elif name in RECIPES or name in OFFLOADS:
        yield name, row.mesh, ""
        if level:
            yield name, row.mesh, level


def unbeaten(plans: list[Plan]) -> list[Plan]:
    """Those than which no other is better in step time or memory and at least as good in both, the fastest first; of
    equals one."""
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.predicted.step_s, p.predicted.memory_bytes)):
        if not found or plan.predicted.memory_bytes < found[-1].predicted.memory_bytes:
            found.append(plan)
    return found
