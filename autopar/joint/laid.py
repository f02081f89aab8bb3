"""One shape under one timetable, laid out: cut into stages, timed by the schedule's own order, its memory counted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cluster import Mesh
from autopar.cost.comm import collective_s
from autopar.decided import local_share
from autopar.errors import InfeasibleError
from autopar.joint.inner import Chosen, Inner
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Timetable
from autopar.memory import predict
from autopar.memory.within import within
from autopar.pipeline.assemble import pipelined
from autopar.pipeline.balance import Cost, Cuts, balance, memory_bytes
from autopar.pipeline.orders import StageTime
from autopar.pipeline.shared import shared_weights
from autopar.pipeline.units import Unit
from autopar.pipeline.views import View, views
from autopar.plan import Plan, Stage
from autopar.planner import bare_plan
from autopar.problem.graph import Program, Ref


@dataclass(frozen=True, eq=False)
class Found:
    """One priced answer: its plan without a prediction, at which level blocks are run again where they are, seconds of a step, bytes of
    the fullest place, seconds of the busiest place's own work."""

    plan: Plan
    shape: Shape
    table: Timetable
    level: str
    step_s: float
    memory_bytes: float
    busy_s: float


def lay(inner: Inner, name: str, shape: Shape, table: Timetable, chosen: Chosen, *, whole: bool = False) -> Found:
    """What a place has `chosen` under `table`, with no more blocks run again than memory wants. `whole`: the order of the whole
    step is timed, not that of a shorter one, and its memory walked as it runs, not added up.

    Raises InfeasibleError where no cut fits, or a place would have nothing to train.
    """
    flat = bare_plan(inner.whole, inner.mesh(shape), chosen.model.decode(chosen.solution.choice), name)
    even, times = _cut(inner, flat, shape, table, chosen, (), whole=whole)
    if table.stages == 1 or not _waits_for_links(times):
        return even
    with suppress(InfeasibleError):
        other, _ = _cut(inner, flat, shape, table, chosen, _sends_s(inner, shape, flat), whole=whole)
        return min(even, other, key=lambda found: found.step_s)
    return even


def _waits_for_links(times: Sequence[StageTime]) -> bool:
    """Whether some link is busy for longer than any stage, so that other cuts may be faster than the most even ones."""
    return 2 * max(time.send_s for time in times[:-1]) > max(time.of("F") + time.of("B") for time in times)


def _cut(inner: Inner, flat: Plan, shape: Shape, table: Timetable, chosen: Chosen, sends_s: Sequence[float], *,
         whole: bool) -> tuple[Found, Sequence[StageTime]]:
    """`flat` under `table`, cut as `balance` has it where a cut in front of each piece sends `sends_s`, and the times of its stages."""
    pieces = chosen.again if chosen.all_again else chosen.pieces

    def cut(limit_bytes: float) -> tuple[Plan, list[list[Cost]], float]:
        cuts = balance(pieces, table.flying, limit_bytes / table.kind.virtual, chosen.again, sends_s)
        parts = cuts.parts(pieces, chosen.again)
        held = _held(parts, table)
        for place, nbytes in enumerate(held):
            if nbytes > limit_bytes:
                raise InfeasibleError(f"place {place} needs {nbytes / 2**30:.2f} GiB, {limit_bytes / 2**30:.2f} GiB are there",
                                      missing_bytes=nbytes - limit_bytes)
        plan = _assembled(inner, flat, shape, table, chosen, cuts)
        return plan, parts, predict(inner.whole.program, plan).peak_bytes if whole else max(held)

    plan, parts, peak_bytes = within(inner.limit_bytes, cut, lambda made: made[2])
    seen = views(inner.whole.program, plan) if table.stages > 1 else ()
    times = _times(inner, shape, table, plan, parts, seen)
    ends = table.ends_s(times, whole=whole, alone=inner.request.cluster.device.alone)
    once = _by_place(table, [sum(c.once_s for c in part) for part in parts])
    if table.places > 1 and inner.request.settings.training:
        for shared in shared_weights(inner.whole.program, plan, seen, inner.line(shape).axes[0]):
            once = [late + shared.seconds * (place in shared.places) for place, late in enumerate(once)]
    step_s = max(end + late for end, late in zip(ends, once, strict=True))
    busy = _by_place(table, [shape.microbatches * sum(c.micro_s for c in part) for part in parts])
    return Found(plan, shape, table, chosen.level, step_s, peak_bytes, max(busy)), times


def _assembled(inner: Inner, flat: Plan, shape: Shape, table: Timetable, chosen: Chosen, cuts: Cuts) -> Plan:
    """`flat` cut into stages, without a prediction."""
    rerun = chosen.all_again or any(cuts.again)
    remat = inner.levels(chosen.level) if rerun else {}
    run_again = replace(flat, remat={scope: tuple(names) for scope, names in remat.items()})
    made = pipelined(run_again, inner.whole.program, cuts.bounds, table.kind.schedule, shape.places, inner.shared(shape.microbatches), shape.microbatches)
    if chosen.all_again or not rerun:
        return made
    stages = [replace(stage, again=_counts(inner.units[first:first + count], stage))
              for stage, first, count in zip(made.stages, [0, *cuts.bounds], cuts.again, strict=True)]
    return replace(made, stages=tuple(stages))


def _counts(pieces: Sequence[Unit], stage: Stage) -> dict[str, int]:
    """How many instances of each run of a stage are among its first `pieces`."""
    return {scope: sum(unit.name == scope for unit in pieces) for scope in stage.blocks}


def _by_place(table: Timetable, values: Sequence[float]) -> list[float]:
    """What the stages of each place have together."""
    return [sum(value for value, at in zip(values, table.at, strict=True) if at == place) for place in range(table.places)]


def _held(parts: Sequence[Sequence[Cost]], table: Timetable) -> list[float]:
    """Bytes of each place. Raises InfeasibleError where a place would hold no parameter: torch's optimizers refuse a rank without
    any, and there is nothing to gain."""
    rest = _by_place(table, [sum(c.rest_bytes for c in part) for part in parts])
    if not all(rest):
        raise InfeasibleError(f"place {rest.index(0)} of {table.places} would hold no parameter")
    return _by_place(table, [memory_bytes(part, n) for part, n in zip(parts, table.flying, strict=True)])


def _times(inner: Inner, shape: Shape, table: Timetable, plan: Plan, parts: Sequence[Sequence[Cost]], seen: Sequence[View]) -> list[StageTime]:
    """Seconds of each stage in one microbatch."""
    if table.stages == 1:
        return [_stage_time(parts[0], 0.0, split=False, training=inner.request.settings.training)]
    program, axis = inner.planner(shape.microbatches).program, inner.line(shape)
    action_s = inner.request.cluster.device.action_s if shape.places > 1 else 0.0
    return [_stage_time(part, _send_s(program, plan, view.sends, axis), split=table.schedule.splits_backward and view.separable,
                        training=inner.request.settings.training, action_s=action_s)
            for part, view in zip(parts, seen, strict=True)]


def _sends_s(inner: Inner, shape: Shape, flat: Plan) -> list[float]:
    """Seconds of sending what a cut in front of each piece takes apart, in one microbatch."""
    program, line = inner.planner(shape.microbatches).program, inner.line(shape)
    known: dict[tuple[Ref, ...], float] = {}
    for sends in (crossings := inner.crossing(flat, shape.microbatches)):
        if sends not in known:
            known[sends] = _send_s(program, flat, sends, line)
    return [known[sends] for sends in crossings]


def _send_s(program: Program, plan: Plan, sends: Sequence[Ref], line: Mesh) -> float:
    """Seconds of sending what leaves a stage in one microbatch."""
    return sum(collective_s("send", local_share(plan, ref) * program.bytes_of(ref), line.axes[0]) for ref in sends)


def _stage_time(part: Sequence[Cost], send_s: float, *, split: bool, training: bool, action_s: float = 0.0) -> StageTime:
    """A stage's time, with `action_s` for each action; of a backward in two parts half is for what was received, half for the weights: as many products each."""
    seconds, forward_s = sum(c.micro_s for c in part), sum(c.forward_s for c in part)
    back_s = max(0.0, seconds - forward_s) if training else 0.0
    whole_s = back_s + action_s
    return StageTime(seconds - back_s + action_s, back_s / 2 + action_s if split else whole_s, back_s / 2 + action_s if split else 0.0, send_s)
