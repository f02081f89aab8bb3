"""Seconds of each stage of a cut plan in one microbatch: its actions, and the sends between stages. Called by
joint.staging."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cluster import MeshAxis
from autopar.cost.comm import collective_s
from autopar.decisions import local_share
from autopar.joint.place_kinds import Ground
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Chosen
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable
from autopar.pipeline.orders import StageTime
from autopar.pipeline.stage_views import View
from autopar.pipeline.stretches import Cost, stage_time
from autopar.plan import Plan
from autopar.problem.graph import Program, Ref


@dataclass(frozen=True, eq=False)
class Laying:
    """The arguments of `staging.lay`: the choices `chosen` of a shape under one timetable, on the places of `ground`.
    `flat` is the plan of one stage with these choices; `whole` as in `lay`. `timed` are the times of stages so far, by
    the identities of their pieces (alike blocks share one Cost) and all else that they depend on."""

    context: SearchContext
    shape: Shape
    table: Timetable
    ground: Ground
    chosen: Chosen
    flat: Plan
    whole: bool
    timed: dict[object, tuple[Sequence[Cost], StageTime]] = field(init=False, default_factory=dict)


def all_times(here: Laying, plan: Plan, parts: Sequence[Sequence[Cost]], seen: Sequence[View]) -> list[StageTime]:
    """Seconds of each stage in one microbatch."""
    if here.table.stages == 1:
        training = here.context.request.settings.training
        return [stage_time(parts[0], 0.0, split=False, training=training, opens=True)]
    program = here.context.planner(here.shape.microbatches).program
    sent_s = [_send_s(program, plan, view.sends, link) for view, link in zip(seen, _hops(here), strict=False)]
    return [one_time(here, seen, stage, *each) for stage, each in enumerate(zip(parts, [*sent_s, 0.0], strict=True))]


def one_time(here: Laying, seen: Sequence[View], stage: int, part: Sequence[Cost], send_s: float) -> StageTime:
    """Seconds of one of several stages, which is separable as its view in `seen`."""
    table = here.table
    split = table.schedule.splits_backward and seen[stage].separable
    action_s = here.ground.places.device(table.at[stage]).action_s if table.places > 1 else 0.0
    key = (*map(id, part), send_s, split, not stage, action_s)
    if key not in here.timed:
        training = here.context.request.settings.training
        time = stage_time(part, send_s, split=split, training=training, opens=not stage, action_s=action_s)
        here.timed[key] = part, time  # with its pieces, so that no other ones get their identities
    return here.timed[key][1]


def wait_for_links(times: Sequence[StageTime]) -> bool:
    """Whether some link is busier than every stage: then a less even cut may be faster."""
    return 2 * max(time.send_s for time in times[:-1]) > max(time.of("F") + time.of("B") for time in times)


def _hops(here: Laying) -> list[MeshAxis]:
    """The links from each stage to the next."""
    return [here.ground.places.link(a, b) for a, b in itertools.pairwise(here.table.at)]


def pieces_send_s(here: Laying) -> list[float]:
    """For each piece, seconds of one microbatch for sending what crosses a cut before it, over the slowest link between
    two stages."""
    program, flat = here.context.planner(here.shape.microbatches).program, here.flat
    known: dict[tuple[Ref, ...], float] = {}
    for sends in (crossings := here.context.crossing(flat, here.shape.microbatches)):
        if sends not in known:
            known[sends] = max(_send_s(program, flat, sends, link) for link in dict.fromkeys(_hops(here)))
    return [known[sends] for sends in crossings]


def _send_s(program: Program, plan: Plan, sends: Sequence[Ref], link: MeshAxis) -> float:
    """Seconds of one microbatch for sending the results of a stage."""
    return sum(collective_s("send", local_share(plan, ref) * program.bytes_of(ref), link) for ref in sends)
