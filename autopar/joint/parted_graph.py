"""The graph of a pipeline whose places have different layouts: its runs of blocks are divided into parts, so that one
plan can say the layouts of each part. Called by joint.staging.

A run of blocks is divided in front of each stage whose place has other layouts for these blocks, or keeps other results
of blocks that are run again, than the place of the stage before. What only one place has gets the layouts of that
place; what several have (weights that they share, inputs, masks that each makes for itself) gets the layouts that were
chosen for all places alike. A value that is sent between places is sent as it was made, and the place that reads it
changes its layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.bare_plan import bare_plan
from autopar.errors import InfeasibleError
from autopar.joint import shape_models
from autopar.joint.place_kinds import Ground
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Apart, Chosen
from autopar.joint.shapes import Shape
from autopar.pipeline.microbatches import ancestors
from autopar.pipeline.stage_views import View, total_ref, views
from autopar.plan import Plan
from autopar.problem.build import Decisions, Model
from autopar.problem.graph import Program
from autopar.problem.remat import Levels
from autopar.problem.types import Solution
from passes.part_runs import parts_at

Laid = tuple[SearchContext, Chosen, Plan]


def parted(context: SearchContext, shape: Shape, ground: Ground, apart: Apart, cut: Plan) -> Laid:
    """The context of the divided graph, the choices there, and the plan of one stage with them. `apart` has the choices
    of each place, `cut` the stages. Raises InfeasibleError where the layout in which one place makes a value cannot
    become the one in which another place reads it."""
    begins = {scope: _begins(context, apart, cut, scope) for scope in context.whole.program.runs}
    parts = parts_at(context.gm, {scope: list(firsts)[1:] for scope, firsts in begins.items() if len(firsts) > 1})
    there = context.parted(parts)
    place_of = {
        name: place
        for scope, firsts in begins.items()
        for name, place in zip([scope, *parts.get(scope, ())], firsts.values(), strict=True)
    }
    decisions = _decisions(context, there, apart, cut, place_of)
    kept = {
        scope: names
        for scope, place in place_of.items()
        for names in [kept_in_part(context, there, apart.each[place], scope)]
        if names is not None
    }
    made = fixed(there, shape, ground, decisions, apart, kept)
    flat = bare_plan(there.whole, there.mesh(shape), decisions, cut.strategy, cluster=ground.places.cluster)
    return there, made, replace(flat, parted=parts)


def fixed(
    there: SearchContext, shape: Shape, ground: Ground, decisions: Decisions, like: Chosen, kept: Levels
) -> Chosen:
    """The choices `decisions` on the divided graph of `there`, run again as those of `like`, whose blocks keep `kept`
    then. Raises InfeasibleError where what one part makes cannot become what the next one reads."""
    models = shape_models.fixed_choices(there, shape, ground, decisions)
    choice = (0,) * len(models.micro.problem.nodes)
    if not models.micro.problem.price(choice).feasible:
        raise InfeasibleError("what one place makes cannot become what the next one reads")
    solution = Solution(choice, "ilp")
    return Chosen(models, models.micro, solution, like.level, like.apart, like.all_again, like.bound_s, kept=kept)


def kept_in_part(context: SearchContext, there: SearchContext, chosen: Chosen, scope: str) -> tuple[str, ...] | None:
    """What the blocks of a part keep where they are run again; None where they are not."""
    kept = chosen.levels(context.whole).get(there.origin(f"{scope}/")[:-1])
    if kept is None:
        return None
    return tuple(
        op.name
        for op in there.whole.program.ops.values()
        if op.scope == scope and op.role == "op" and there.origin(op.name) in kept
    )


def _begins(context: SearchContext, apart: Apart, cut: Plan, scope: str) -> dict[int, int]:
    """For the parts of the run `scope`: first instance -> place."""
    own = [index for index, cluster in enumerate(apart.model.clusters) if cluster.scope == scope]

    def way(place: int) -> tuple[object, ...]:
        each = apart.each[place]
        return (each.levels(context.whole).get(scope), *(each.solution.choice[index] for index in own))

    found: dict[int, int] = {}
    for stage in cut.stages:
        if scope in stage.blocks and (not found or way(stage.place) != way(list(found.values())[-1])):
            found[stage.blocks[scope][0]] = stage.place
    return found


def _decisions(
    context: SearchContext, there: SearchContext, apart: Apart, cut: Plan, place_of: Mapping[str, int]
) -> Decisions:
    """One option per operator and axis: that of its place for operators of a part, and for operators that only one
    place has; that of all places alike for the others."""
    shared, own = (
        apart.model.decode(apart.solution.choice),
        [each.model.decode(each.solution.choice) for each in apart.each],
    )
    alone = only_place(apart.model, context.whole.program, cut, views(context.whole.program, cut))
    found: Decisions = {}
    for name, op in there.whole.program.ops.items():
        place = place_of[op.scope] if op.scope else alone.get(name)
        found[name] = (shared if place is None else own[place])[there.origin(name)]
    return found


def only_place(model: Model, program: Program, cut: Plan, seen: Sequence[View]) -> dict[str, int]:
    """The operators outside of blocks that only one place has, and those decided together with them -> that place.
    `seen` are the views of the stages of `cut`."""
    has: dict[str, dict[int, None]] = {}
    for view, stage in zip(seen, cut.stages, strict=True):
        for name in (*view.ops, *view.held, *view.inputs):
            has.setdefault(name, {})[stage.place] = None
    before = ancestors(program, [total_ref(text) for text in cut.totals])
    found: dict[str, int] = {}
    for cluster in model.clusters:
        if cluster.scope:
            continue
        names = [op.name for op in cluster.members if op.name in has or op.role == "op"]
        places = {place for name in names for place in has.get(name, {})}
        if len(places) == 1 and not any(name in before for name in names):
            found.update(dict.fromkeys((op.name for op in cluster.members), *places))
    return found
