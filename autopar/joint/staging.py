"""Laying out a shape under one timetable: the model is cut into stages, the step is timed by the schedule's own order
of actions, and memory is counted. `lay` is called by joint.pricing and joint.own_layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from autopar.bare_plan import bare_plan
from autopar.errors import InfeasibleError
from autopar.joint import parted_graph
from autopar.joint.place_kinds import Ground
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Apart, Chosen
from autopar.joint.shapes import Shape
from autopar.joint.stage_times import Laying, all_times, one_time, pieces_send_s, wait_for_links
from autopar.joint.timetables import Timetable
from autopar.memory import hosts, predict
from autopar.memory.plans_that_fit import within
from autopar.pipeline.assemble import check_trained, pipelined
from autopar.pipeline.balance import balance
from autopar.pipeline.cut_search import Shifting, are_few
from autopar.pipeline.filling import Cuts
from autopar.pipeline.in_flight import place_bytes
from autopar.pipeline.orders import StageTime
from autopar.pipeline.rerun_counts import fitted
from autopar.pipeline.shared_weights import Shared, shared_weights
from autopar.pipeline.stage_views import views
from autopar.pipeline.stretches import Cost, Pieces
from autopar.pipeline.units import Unit
from autopar.plan import Plan, Stage
from autopar.problem.graph import Program
from autopar.recipes import offload as offloads

UNEVEN = 0.01  # relative: a place that is busier than the mean by more calls for a cut that balances places
RESERVED = 4  # cuts that are tried with room reserved on single places
ALIKE = 1e-3  # relative: of cuts whose steps differ by less, the most even one is taken


@dataclass(frozen=True, eq=False)
class Found:
    """One priced pipeline.

    plan            the plan, without a prediction; `program` is what it is for, with runs of blocks in parts where
                    places differ
    level           the level of rematerialisation of blocks that run again
    step_s          seconds of a step; `busy_s`: of the work of the busiest place in it
    places_bytes    bytes of the fullest rank of each place; `filled`: the largest share of its limit that one of
                    them takes
    chosen, ground, cuts    the choices, the places and the cut that were laid out
    """

    plan: Plan
    shape: Shape
    table: Timetable
    level: str
    step_s: float
    places_bytes: tuple[float, ...]
    filled: float
    busy_s: float
    chosen: Chosen
    ground: Ground
    cuts: Cuts
    program: Program  # that the plan is for: its runs of blocks are in parts where places have layouts of their own
    alike_s: float = 0.0  # where places have layouts of their own: seconds of a step with common ones
    even_s: float = 0.0  # where cuts were shifted: seconds of a step with stages as even as they can be

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank of all."""
        return max(self.places_bytes)


def lay(
    context: SearchContext,
    name: str,
    shape: Shape,
    table: Timetable,
    ground: Ground,
    chosen: Chosen,
    *,
    whole: bool = False,
    shifts: bool = True,
    bounds: Sequence[int] = (),
) -> Found:
    """Lay out the choices `chosen` of a shape under `table`, on the places of `ground`, with as few blocks run again as
    memory requires.

    `whole`: time the order of the whole step, not of a shorter one, and walk its memory, in place of adding it up.
    `shifts`: cuts are shifted (pipeline.cut_search), where a model has many only with `whole`. `bounds`: where stages
    begin, if that is known.

    Raises InfeasibleError where no cut fits, or a place would have nothing to train.
    """
    flat = bare_plan(
        context.whole,
        context.mesh(shape),
        chosen.model.decode(chosen.solution.choice),
        name,
        cluster=ground.places.cluster,
    )
    here = Laying(context, shape, table, ground, chosen, flat, whole)
    even, times = _cut(here, (), bounds=bounds)
    if bounds:
        return even
    found = [even]
    if table.virtual > 1 and _unevenly_busy(table, times):
        with suppress(InfeasibleError):
            found.append(_cut(here, (), by_place=True)[0])
    if table.stages > 1 and wait_for_links(times):
        with suppress(InfeasibleError):
            found.append(_cut(here, pieces_send_s(here))[0])
    fastest_s = min(f.step_s for f in found)
    best = next(f for f in found if f.step_s <= fastest_s * (1 + ALIKE))
    shifts = (
        shifts
        and table.stages > 1
        and context.request.cluster.device.alone <= 1
        and (whole or are_few(len(context.units), table.stages, context.barred))
    )
    return _shifted(here, best) if shifts else best


@dataclass(frozen=True, eq=False)
class _Cut:
    """A plan that is cut into stages: the pieces of each stage (`parts`) and the bytes per device of each place
    (`held`); `on` is what it was made from."""

    on: Laying
    cuts: Cuts
    plan: Plan
    parts: list[list[Cost]]
    held: list[float]


def _by_stage(here: Laying) -> list[Pieces]:
    """For each stage, the costs of all pieces on its place."""
    return [here.chosen.on(place, here.ground.kinds[place]) for place in here.table.at]


def _unevenly_busy(table: Timetable, times: Sequence[StageTime]) -> bool:
    """Whether one place is busier than the others: then a cut that relieves it may be faster, though its slowest stage
    is longer."""
    busy = _by_place(table, [time.of("F") + time.of("B") for time in times])
    return max(busy) * table.places > sum(busy) * (1 + UNEVEN)


def _cut(
    here: Laying, sends_s: Sequence[float], *, by_place: bool = False, bounds: Sequence[int] = ()
) -> tuple[Found, Sequence[StageTime]]:
    """Cut the model into stages at `bounds`, or by `balance`, with memory limits. `sends_s`: seconds to send what
    crosses a cut in front of each piece; `by_place`: balance places, not single stages. The result, and the times of
    its stages."""
    context, table, ground = here.context, here.table, here.ground
    pieces = _by_stage(here)
    largest = max(ground.limits)

    def cut(limits: Sequence[float]) -> _Cut:
        cuts = (
            Cuts([*bounds], [0] * table.stages)
            if bounds
            else balance(
                pieces,
                table.flying,
                [limits[place] for place in table.at],
                sends_s,
                context.barred,
                table.at,
                needed=context.filled(pieces[0].costs),
                by_place=by_place,
            )
        )
        return _made(here, pieces, fitted(pieces, cuts, table.at, table.in_flight, limits))

    def peak_bytes(made: _Cut) -> float:
        """The peak, as if all places had as much as the largest."""
        return max(
            nbytes + (largest - own if own < largest else 0.0)
            for nbytes, own in zip(made.held, ground.limits, strict=True)
        )

    made = _reserving(here, cut)
    return _timed(
        here,
        made
        or within(
            largest, lambda limit_bytes: cut([own - (largest - limit_bytes) for own in ground.limits]), peak_bytes
        ),
    )


def _reserving(here: Laying, cut: Callable[[Sequence[float]], _Cut]) -> _Cut | None:
    """A cut in which each place that is too full has room reserved for what the walk counts there beyond the sum of its
    pieces; None where that does not fit soon. Raises InfeasibleError where nothing fits with nothing reserved."""
    limits, reserved = here.ground.limits, [0.0] * len(here.ground.limits)
    for attempt in range(RESERVED):
        try:
            made = cut([own - more for own, more in zip(limits, reserved, strict=True)])
        except InfeasibleError:
            if not attempt:
                raise
            return None
        if all(nbytes <= own for nbytes, own in zip(made.held, limits, strict=True)):
            return made
        before, added = reserved, _held(made.parts, here.table)
        reserved = [
            max(more, nbytes - sum_) if nbytes > own else more
            for more, nbytes, sum_, own in zip(before, made.held, added, limits, strict=True)
        ]
        if reserved == before:
            return None
    return None


def _parted(here: Laying, cuts: Cuts) -> Laying:
    """`here` with runs of blocks divided into parts at the cuts, where places have layouts of their own; else
    unchanged."""
    if not isinstance(here.chosen, Apart):
        return here
    context, chosen, flat = parted_graph.parted(
        here.context, here.shape, here.ground, here.chosen, _assembled(here, cuts)
    )
    return replace(here, context=context, chosen=chosen, flat=flat)


def _made(here: Laying, pieces: Sequence[Pieces], cuts: Cuts) -> _Cut:
    """The plan cut at `cuts`. Raises InfeasibleError where a place would have nothing to train."""
    on = _parted(here, cuts)
    parts = cuts.parts(pieces if on is here else _by_stage(on))
    held = _held(parts, here.table)
    plan, program = _assembled(on, cuts), on.context.whole.program
    check_trained(program, plan)
    return _Cut(
        on, cuts, plan, parts, [place.peak_bytes for place in predict(program, plan).places] if here.whole else held
    )


def _shifted(here: Laying, found: Found) -> Found:
    """`found`, or the result of shifting its cuts (pipeline.cut_search), where that is faster."""
    context, table, ground = here.context, here.table, here.ground
    pieces = _by_stage(here)
    added = _held(found.cuts.parts(pieces), table)
    room = [
        limit - max(0.0, walked - nbytes)
        for limit, walked, nbytes in zip(ground.limits, found.places_bytes, added, strict=True)
    ]
    blocks = frozenset(index for index, unit in enumerate(context.units) if unit.instance >= 0)
    cuts = Shifting(
        pieces,
        table.in_flight,
        room,
        table.at,
        context.barred,
        blocks,
        [*pieces_send_s(here), 0.0],
        partial(one_time, here, views(found.program, found.plan)),
        table.ends_all_s,
        table.actions,
    ).shifted(found.cuts)
    if cuts == found.cuts:
        return found
    with suppress(InfeasibleError):
        made = _made(here, pieces, cuts)
        if all(nbytes <= limit for nbytes, limit in zip(made.held, ground.limits, strict=True)):
            other, _ = _timed(here, made)
            return replace(other, even_s=found.step_s) if other.step_s < found.step_s * (1 - ALIKE) else found
    return found


def _timed(here: Laying, made: _Cut) -> tuple[Found, Sequence[StageTime]]:
    """The result of a cut plan (step time, bytes of each place), and the times of its stages. Raises InfeasibleError
    where hosts have too little memory."""
    context, shape, table, ground = here.context, here.shape, here.table, here.ground
    plan, parts, held, program = made.plan, made.parts, made.held, made.on.context.whole.program
    if plan.offload:
        offloads.fits(f"{plan.offload} on the host", hosts.of_a_device(program, plan), ground.places.cluster)
    seen = views(program, plan) if table.stages > 1 else ()
    times = all_times(made.on, plan, parts, seen)
    ends = table.ends_s(times, whole=here.whole, alone=context.request.cluster.device.alone)
    step_s = max(
        _done_s(
            made,
            ends,
            shared_weights(program, plan, seen, ground.places)
            if context.request.settings.training and table.places > 1
            else (),
        )
    )
    busy = _by_place(table, [shape.microbatches * sum(c.micro_s for c in part) for part in parts])
    filled = max(nbytes / own for nbytes, own in zip(held, ground.limits, strict=True))
    return Found(
        plan,
        shape,
        table,
        here.chosen.level,
        step_s,
        tuple(held),
        filled,
        max(busy),
        here.chosen,
        ground,
        made.cuts,
        program,
    ), times


def _assembled(here: Laying, cuts: Cuts) -> Plan:
    """The plan cut into stages, without a prediction."""
    context, shape, chosen = here.context, here.shape, here.chosen
    rerun = chosen.all_again or any(cuts.again)
    remat = chosen.levels(context.whole) if rerun else {}
    run_again = replace(here.flat, remat={scope: tuple(names) for scope, names in remat.items()})
    made = pipelined(
        run_again,
        context.whole.program,
        cuts.bounds,
        here.table.kind.schedule,
        shape.places,
        context.shared(shape.microbatches),
        shape.microbatches,
    )
    if chosen.all_again or not rerun:
        return made
    stages = [
        replace(stage, again=_counts(context.units[first : first + count], stage))
        for stage, first, count in zip(made.stages, [0, *cuts.bounds], cuts.again, strict=True)
    ]
    return replace(made, stages=tuple(stages))


def _counts(pieces: Sequence[Unit], stage: Stage) -> dict[str, int]:
    """By run of blocks, how many of the first `pieces` of a stage are instances of it."""
    return {scope: sum(unit.name == scope for unit in pieces) for scope in stage.blocks}


def _by_place(table: Timetable, values: Sequence[float]) -> list[float]:
    """For each place, the sum of `values` (one per stage) over its stages."""
    return [sum(table.of_place(place, values)) for place in range(table.places)]


def _done_s(made: _Cut, ends: Sequence[float], shared: Sequence[Shared]) -> list[float]:
    """For each place, the seconds until its part of the step is done. `ends` is when its stages are done, and their
    gradients are summed over ranks. Then gradients of weights that several places `shared` are summed, once all these
    places are there; then it updates its weights."""
    table, parts = made.on.table, made.parts
    update_s = [
        own - more
        for own, more in zip(
            _by_place(table, [sum(c.update_s for c in part) for part in parts]),
            _updated_twice_s(made.on, parts),
            strict=True,
        )
    ]
    summed_s = _by_place(table, [sum(c.once_s - c.update_s for c in part) for part in parts])
    summed = [end + own for end, own in zip(ends, summed_s, strict=True)]
    for each in shared:
        together = max(summed[place] for place in each.places) + each.seconds
        summed = [together if place in each.places else end for place, end in enumerate(summed)]
    return [end + own for end, own in zip(summed, update_s, strict=True)]


def _updated_twice_s(here: Laying, parts: Sequence[Sequence[Cost]]) -> list[float]:
    """For each place, the seconds of weight updates that are counted more than once, because several of its pieces read
    the weight."""
    if not here.chosen.apart:
        return [0.0] * here.table.places
    table, first = here.table, [0, *itertools.accumulate(map(len, parts))]
    names = [[unit.name for unit in here.context.units[a:b]] for a, b in itertools.pairwise(first)]
    each = [[name for mine in table.of_place(place, names) for name in mine] for place in range(table.places)]
    return [
        sum(update.too_many_s(pieces) for update in here.chosen.updates(place, here.ground.kinds[place]))
        for place, pieces in enumerate(each)
    ]


def _held(parts: Sequence[Sequence[Cost]], table: Timetable) -> list[float]:
    """Bytes of each place. Raises InfeasibleError where a place would hold no parameter: torch's optimizers refuse a
    rank without any, and there is nothing to gain."""
    rest = _by_place(table, [sum(c.rest_bytes for c in part) for part in parts])
    if not all(rest):
        have, count = sum(c.rest_bytes > 0 for part in parts for c in part), sum(map(len, parts))
        raise InfeasibleError(
            f"place {rest.index(0)} of {table.places} would hold no parameter: {have} of the {count} pieces that "
            "stages are made of (blocks, and operators outside of blocks) have any; use fewer places, or a recipe "
            "without a pipeline"
        )
    return [place_bytes(table.of_place(place, parts), flying) for place, flying in enumerate(table.in_flight)]
