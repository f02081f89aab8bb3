"""`predict`: the peak of every place of a plan, from the profile of one microbatch in each stage (memory.stage) and the
schedule (memory.place)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from autopar.cluster import Cluster
from autopar.codegen.edges import Edges, edges
from autopar.memory.at_rest import sends_gradient
from autopar.memory.habits import EMITTED, Habits
from autopar.memory.place import Holding
from autopar.memory.shares import Shares
from autopar.memory.stage import Profile, profile
from autopar.memory.types import Prediction
from autopar.memory.walked import Part, Split
from autopar.pipeline.orders import Action, lines_of, telling
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.stage_views import View, views, whole
from autopar.pipeline.transit import Transit, transits_of
from autopar.plan import Plan
from autopar.problem.graph import Op, Program
from autopar.problem.prices import Prices
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings


def predict(program: Program, plan: Plan, habits: Habits = EMITTED) -> Prediction:
    """Peak bytes of each place for the sizes at which `program` was read, those of the whole batch of `plan`. `habits`
    say how the software that runs it holds memory, by default an emitted module. Of many microbatches as many are
    walked as tell all (orders.telling)."""
    return Prediction(tuple(rank.place() for rank in fullest(program, plan, habits, walked=_telling(plan))))


def memory_of(gm: fx.GraphModule, plan: Plan) -> Prediction:
    """`predict` for the captured graph that `plan` was made for, at the sizes that it was planned for."""
    kind = Cluster.from_dict(dict(plan.cluster)).device.kind
    return predict(read(gm, plan.hints, training=plan.mode == "train", device=kind), plan)


def _telling(plan: Plan) -> Plan:
    """`plan` with as many microbatches as tell all of its memory."""
    if plan.mode != "train" or plan.places == 1:
        return plan
    return replace(plan, microbatches=telling(plan.schedule, plan.places, plan.microbatches))


def fullest(program: Program, plan: Plan, habits: Habits = EMITTED, *, walked: Plan | None = None) -> list[Holding]:
    """The fullest rank of each place, which runs what it does in a step of `walked`, the same with another number of
    microbatches of the same size (None: of `plan`); sizes as in `predict`."""
    found, stages = edges(program, plan), views(program, plan) if len(plan.stages) > 1 else (whole(program),)
    placed = Shares(program, plan).placed_axes
    coords = [dict(zip(placed, at, strict=True)) for at in itertools.product(*(range(plan.mesh[a]) for a in placed))]
    lines, transits = lines_of(walked or plan), transits_of(walked or plan)
    profiles: list[dict[Any, Profile]] = [{} for _ in coords]
    places = []
    for number in range(plan.places):
        ranks = [
            _holding(
                Shares(program, plan, coord, habits), found, stages, number, (lines[number], transits[number]), known
            )
            for coord, known in zip(coords, profiles, strict=True)
        ]
        places.append(max(ranks, key=lambda rank: rank.place().peak_bytes) if len(ranks) > 1 else ranks[0])
    return places


def _holding(
    shares: Shares,
    found: Edges,
    stages: Sequence[View],
    number: int,
    line: tuple[Sequence[Action], Sequence[Transit]],
    known: dict[Any, Profile],
) -> Holding:
    """One rank of a place, which runs the actions `line`; `known` are profiles of like stages."""
    plan = shares.plan
    here = [stages[stage] for stage in plan.stages_on(number)]
    training, extra = plan.mode == "train", extra_bytes(shares)
    profiles = {}
    for view in here:
        part, split = _part(view, plan), _split(view, plan)
        blocks = tuple((scope, first > 0, stop - first) for scope, (first, stop) in part.blocks.items())
        key = (
            part.ops,
            blocks,
            part.given,
            part.receives,
            part.sends,
            part.results,
            tuple(part.again.items()),
            part.brought,
            part.leaves,
            split,
        )
        if key not in known:
            walked = partial(
                profile,
                shares,
                found,
                extra,
                part,
                training=training,
                stay=plan.microbatches == 1 and not shares.habits.standing,
            )
            known[key] = walked(split=split)
            if split == "apart" and any(action.kind == "B" for action in line[0]):
                known[key].whole = walked()
        profiles[view.index] = known[key]
    ways = (reshard for reshard in found.reshards if reshard.role == "sync")
    synced = frozenset(way.ref[0] for way in ways if sends_gradient(shares.program.ops[way.ref[0]], here))
    return Holding(shares, number, here, profiles, len(plan.stages) > 1, *line, synced)


def _split(view: View, plan: Plan) -> Split:
    """A stage that cannot be taken apart runs all of its backward where its part for inputs is due
    (runtime.stages.OwnStage)."""
    if len(plan.stages) == 1 or not SCHEDULES[plan.schedule].splits_backward:
        return ""
    return "apart" if view.separable else "inputs"


def _part(view: View, plan: Plan) -> Part:
    again = {
        scope: plan.again(plan.stages[view.index], scope, stop - first) for scope, (first, stop) in view.blocks.items()
    }
    places = [stage.place for stage in plan.stages[max(0, view.index - 1) : view.index + 2]]
    borders = [here != there for here, there in itertools.pairwise(places)]
    brought, leaves = view.index > 0 and borders[0], view.index + 1 < len(plan.stages) and borders[-1]
    return Part(
        frozenset(view.ops),
        dict(view.blocks),
        view.given,
        view.receives,
        view.sends,
        frozenset(op.name for _, op in view.results),
        again,
        brought,
        leaves,
    )


def extra_bytes(shares: Shares) -> Callable[[Op], float]:
    """A function that gives the bytes that the backward of one call keeps in addition to tensors of the graph, for one
    microbatch, by the same prices as the search."""
    plan, cluster = shares.plan, Cluster.from_dict(dict(shares.plan.cluster))
    # how much is kept depends on the kind of device only, which all places share
    places = cluster.places(plan.places, plan.mesh)
    prices = Prices(places.mesh(0), places.device(0), Settings.of(plan))
    return lambda op: prices.extra_bytes(op, shares.options(op)) / op.count * shares.scale(op)
