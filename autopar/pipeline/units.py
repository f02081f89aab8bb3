"""The pieces that a pipeline stage takes whole, and stages made of them.

A unit is an operator of the top-level graph or one instance of a repeated block. Operators that cost next to nothing to
repeat are no units but *free*: operators that depend on sizes, inputs and buffers alone (masks, positions, rope tables)
or on weights alone (casts, transposes) run in every stage that reads them, and their results are never sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.pipeline.schedules import Schedule
from autopar.plan import Stage
from autopar.problem.graph import HOLDERS, Program, Ref


@dataclass(frozen=True, slots=True)
class Unit:
    """A top-level operator (`instance` -1) or instance number `instance` of the run of blocks `name`."""

    name: str
    instance: int = -1


def units(program: Program) -> list[Unit]:
    """All units in execution order."""
    free = free_ops(program)
    found: list[Unit] = []
    seen: dict[str, None] = {}
    for op in program.ops.values():
        if op.scope and op.scope not in seen:
            seen[op.scope] = None
            found += [Unit(op.scope, i) for i in range(program.runs[op.scope].count)]
        elif not op.scope and op.role == "op" and op.name not in free:
            found.append(Unit(op.name))
    return found


def homes(program: Program, pieces: Sequence[Unit]) -> dict[str, str]:
    """Op name -> the piece that it belongs to: itself, its scope, or for what is no piece the first piece that
    reads it. Results of the model go to the piece that makes them; what else nobody reads to the last piece where it
    is computed, to the first where it only rests."""
    own = {unit.name for unit in pieces if unit.instance < 0}
    home = {op.name: op.scope or op.name for op in program.ops.values() if op.scope or op.name in own}
    readers = program.readers
    feeds = {feed: run.scope for run in program.runs.values() for feed in run.feeds}
    first, last = pieces[0].name, pieces[-1].name
    for op in program.results:
        if op.operands and op.operands[0][0] in own:  # blocks share the price of all of them
            home[op.name] = op.operands[0][0]
    for op in reversed(program.ops.values()):
        if op.name in home:
            continue
        names = [
            home[reader.name] for i in range(max(1, len(op.call.outs))) for reader, _ in readers.get((op.name, i), ())
        ]
        names += [feeds[op.name, i] for i in range(len(op.call.outs)) if (op.name, i) in feeds]
        home[op.name] = names[0] if names else (last if op.operands else first)
    return home


def free_ops(program: Program) -> dict[str, None]:
    """Names of the top-level operators that run wherever they are read."""
    from_params: dict[Ref, bool] = {}
    free: dict[str, None] = {}
    carried = {ref for run in program.runs.values() for ref in run.carried}
    for op in program.ops.values():
        if op.scope or op.role not in ("op", *HOLDERS):
            continue
        reads_param = op.role == "param" or any(from_params.get(ref, False) for ref in op.operands)
        for index in range(len(op.call.outs)):
            from_params[op.name, index] = reads_param
        inside = all(
            ref not in carried and (ref[0] in free or program.ops[ref[0]].role in HOLDERS) for ref in op.operands
        )
        if op.role == "op" and inside and (op.of_weights or not (reads_param or op.graded)):
            free[op.name] = None
    return free


def barred(program: Program) -> tuple[int, ...]:
    """Positions in `units(program)` in front of which no stage can begin: those between the units that read a buffer
    and the unit that computes its new value from activations or weights. (A new value from buffers and sizes alone is
    computed in every stage that reads the buffer.)"""
    pieces, free = units(program), free_ops(program)
    at = {
        name: [i for i, unit in enumerate(pieces) if unit.name == name]
        for name in dict.fromkeys(unit.name for unit in pieces)
    }
    home = homes(program, pieces)
    found: dict[int, None] = {}
    for op in program.results:
        if op.role == "mutation" and op.operands[0][0] not in free:
            places = [
                *_read_at(program, (program.buffers[op.fqn], 0), free, at, home),
                *at.get(home[op.operands[0][0]], ())[-1:],
            ]
            found.update(dict.fromkeys(range(min(places) + 1, max(places) + 1)))
    return tuple(sorted(found))


def _read_at(
    program: Program, ref: Ref, free: Collection[str], at: Mapping[str, Sequence[int]], home: Mapping[str, str]
) -> list[int]:
    """The pieces that read a value, through operators that run wherever they are read."""
    found: list[int] = []
    queue = [ref]
    while queue:
        here = queue.pop()
        for port in program.fed.get(here, ()):
            found += at[program.ops[port].scope]
        for reader, _ in program.readers.get(here, ()):
            if reader.name in free:
                queue += [(reader.name, i) for i in range(len(reader.call.outs))]
            elif reader.role == "op":
                found += at.get(home[reader.name], ())
    return found


def stages_of(
    program: Program, bounds: Sequence[int], schedule: Schedule, places: int, totals: Collection[Ref] = ()
) -> tuple[Stage, ...]:
    """The stages between `bounds`, positions in `units(program)` at which a new stage begins (without 0 and the end).
    The `totals` are given to every stage.

    Raises PlanError where a stage would be empty, or the schedule cannot have that many stages on `places` places.
    """
    pieces = units(program)
    edges = [0, *bounds, len(pieces)]
    count = len(edges) - 1
    if any(a >= b for a, b in itertools.pairwise(edges)):
        raise PlanError(
            f"cannot cut {len(pieces)} pieces (operators and blocks) into {count} stages at {list(bounds)}: "
            "every stage needs at least one; use fewer stages"
        )
    _check_count(schedule, count, places)
    free = free_ops(program)
    found = []
    for index in range(count):
        mine = pieces[edges[index] : edges[index + 1]]
        blocks: dict[str, tuple[int, int]] = {}
        for unit in mine:
            if unit.instance >= 0:
                blocks[unit.name] = (blocks.get(unit.name, (unit.instance, 0))[0], unit.instance + 1)
        own = dict.fromkeys(u.name for u in mine if u.instance < 0)
        needed = _needed(program, own, blocks, free, totals, last=index == count - 1)
        nodes = tuple(op.name for op in program.ops.values() if op.name in own or op.name in needed)
        found.append(Stage(nodes, blocks, schedule.place(index, places)))
    return tuple(found)


def _check_count(schedule: Schedule, stages: int, places: int) -> None:
    virtual = schedule.virtual
    right = stages == virtual * places if virtual else stages % places == 0
    if not right:
        wanted = f"{virtual * places}" if virtual else f"a multiple of {places}"
        raise PlanError(f"schedule {schedule.name} on {places} groups of ranks needs {wanted} stages, got {stages}")


def _needed(
    program: Program,
    own: dict[str, None],
    blocks: dict[str, tuple[int, int]],
    free: dict[str, None],
    totals: Collection[Ref],
    *,
    last: bool,
) -> dict[str, None]:
    """The free operators that run in a stage: all that its operators and blocks read, directly or through other free
    operators; and those that compute the new values of buffers that it reads, because it has a copy of the buffer."""
    changed = {op.fqn: op.operands[0] for op in program.results if op.role == "mutation" and op.operands[0][0] in free}
    queue = [ref for name in own for ref in program.ops[name].operands]
    for scope, (first, _) in blocks.items():  # blocks behind the first one have carried values of the stage before
        run = program.runs[scope]
        queue += run.feeds[0 if first == 0 else len(run.carried) :]
    if last:  # results that nothing else makes
        queue += [op.operands[0] for op in program.results]
    found: dict[str, None] = {}
    while queue:
        ref = queue.pop()
        name = ref[0]
        if name in free and name not in found and ref not in totals:
            found[name] = None
            queue += program.ops[name].operands
        elif program.ops[name].role == "buffer" and program.ops[name].fqn in changed:
            queue.append(changed.pop(program.ops[name].fqn))
    return found
