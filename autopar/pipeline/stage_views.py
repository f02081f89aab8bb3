"""What each stage of a plan computes, holds, receives and sends.

Values go from stage to stage in order: one that is read further on rides through the stages between. The state of a run
of blocks that is cut crosses under the name of what its blocks give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.layout import is_placed, parse, steps
from autopar.pipeline.microbatches import ancestors
from autopar.plan import Plan, Stage
from autopar.problem.graph import HOLDERS, Op, Program, Ref
from autopar.problem.tiling import tiled

RESULTS = ("loss", "output", "mutation")


@dataclass(frozen=True)
class View:
    """One stage. `ops` are names of top-level operators that run here, `blocks` the instances `[first, stop)` of each
    run; `held` and `inputs` the parameters, buffers, constants and the inputs that are read, in program order; `given`
    the values taken over the whole batch before; `results` the outputs of the model that are made here, as (number,
    op)."""

    index: int
    ops: Mapping[str, None]
    blocks: Mapping[str, tuple[int, int]]
    held: Mapping[str, None]
    inputs: Mapping[str, None]
    given: tuple[Ref, ...]
    receives: tuple[Ref, ...]
    sends: tuple[Ref, ...]
    results: tuple[tuple[int, Op], ...]
    separable: bool = True
    """Whether the backward may be taken apart. Every weight must meet what is received, or torch loses its gradient;
    and blocks that are run again for the backward would be run again once more for each group of weights, and weights
    that are gathered again, whole or in tiles, gathered so."""

    def runs(self, name: str) -> bool:
        """Whether the top-level operator `name` runs here."""
        return name in self.ops


def views(program: Program, plan: Plan) -> tuple[View, ...]:
    """The views of all stages of `plan`, first to last."""
    count = len(plan.stages)
    totals = [total_ref(text) for text in plan.totals]
    ops = [dict.fromkeys(stage.nodes) for stage in plan.stages]
    reads = [_reads(program, stage) for stage in plan.stages]
    made = [_made(program, stage) for stage in plan.stages]
    owners = _owners(program, made, totals)
    for index, op in _results(program):
        for owner in owners[index]:
            reads[owner].update(
                dict.fromkeys([op.operands[0], *([(program.buffers[op.fqn], 0)] if op.role == "mutation" else [])])
            )
    read = {ref[0] for ref in program.readers} | {feed[0] for run in program.runs.values() for feed in run.feeds}
    changed = {program.buffers[op.fqn] for op in program.results if op.role == "mutation"}
    idle = [
        (op.name, 0)
        for op in program.ops.values()
        if op.role in ("param", "buffer") and not op.scope and op.name not in {*read, *changed}
    ]
    reads[0].update(dict.fromkeys(idle))  # what nobody reads is in the state dict nevertheless
    for index in _firsts(plan) if totals else ():  # every place takes the totals itself
        reads[index].update(
            {(name, 0): None for name in ancestors(program, totals) if program.ops[name].role in ("buffer", "constant")}
        )
    arriving: list[dict[Ref, None]] = [{} for _ in range(count + 1)]
    for index in reversed(range(count)):
        wanted = {**reads[index], **arriving[index + 1]}
        outside = {
            r: None
            for r in wanted
            if r not in made[index] and r not in totals and program.ops[r[0]].role not in HOLDERS
        }
        arriving[index] = {**_unfinished(program, plan.stages[index]), **outside}
    assert not arriving[0], f"nothing can come before the first stage, but {list(arriving[0])} would"
    found, in_tiles, gathering = [], tiled(plan.runs), _gathering_again(program, plan)
    for index, stage in enumerate(plan.stages):
        names = dict.fromkeys(ref[0] for ref in reads[index])
        holders = {name: None for name, op in program.ops.items() if name in names and op.role in HOLDERS}
        found.append(
            View(
                index,
                ops[index],
                stage.blocks,
                held={n: None for n in holders if program.ops[n].role != "input"},
                inputs={n: None for n in holders if program.ops[n].role == "input"},
                given=tuple(r for r in totals if r in reads[index]),
                receives=tuple(arriving[index]),
                sends=tuple(arriving[index + 1]),
                results=tuple((i, op) for i, op in _results(program) if index in owners[i]),
                separable=not any(
                    plan.again(stage, scope, stop - first) for scope, (first, stop) in stage.blocks.items()
                )
                and not any(
                    name in ops[index] or program.ops[name].scope in stage.blocks for name in (*in_tiles, *gathering)
                )
                and _separable(program, stage, arriving[index]),
            )
        )
    return tuple(found)


def whole(program: Program) -> View:
    """The view of a plan that is not cut: all operators, all blocks, all results."""
    top = [op for op in program.ops.values() if not op.scope]
    return View(
        0,
        {op.name: None for op in top if op.role == "op"},
        {run.scope: (0, run.count) for run in program.runs.values()},
        {op.name: None for op in top if op.role in HOLDERS and op.role != "input"},
        {op.name: None for op in top if op.role == "input"},
        (),
        (),
        (),
        tuple(enumerate(program.results)),
    )


def total_ref(text: str) -> Ref:
    """The value that an entry of `Plan.totals` names."""
    name, _, index = text.partition(":")
    return name, int(index or 0)


def _firsts(plan: Plan) -> list[int]:
    """The first stage of each place."""
    found: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        found.setdefault(stage.place, index)
    return [*found.values()]


def _results(program: Program) -> list[tuple[int, Op]]:
    """The results of the model with their numbers."""
    return list(enumerate(program.results))


def _owners(program: Program, made: list[dict[Ref, None]], totals: list[Ref]) -> list[list[int]]:
    """The stages of each result: where its value is made, the last one of several. New values of buffers are for all
    that make them: each has a copy."""
    last = len(made) - 1
    found = []
    for _, op in _results(program):
        ref = op.operands[0]
        here = [i for i, values in enumerate(made) if ref in values and ref not in totals and op.role != "loss"] or [
            last
        ]
        found.append(here if op.role == "mutation" else here[-1:])
    return found


def _reads(program: Program, stage: Stage) -> dict[Ref, None]:
    """What the operators and blocks of a stage read."""
    found = {ref: None for name in stage.nodes for ref in program.ops[name].operands}
    for scope, (first, _) in stage.blocks.items():
        run = program.runs[scope]
        feeds = run.feeds if first == 0 else run.feeds[len(run.carried) :]
        found.update(dict.fromkeys(feeds))
    return found


def _made(program: Program, stage: Stage) -> dict[Ref, None]:
    """What a stage makes: results of its operators, and of runs of blocks that end in it."""
    found = {(name, i): None for name in stage.nodes for i in range(len(program.ops[name].call.outs))}
    for scope in stage.blocks:
        found.update(dict.fromkeys(program.runs[scope].carried))
    return found


def _unfinished(program: Program, stage: Stage) -> dict[Ref, None]:
    """The states of runs of blocks that began in an earlier stage."""
    return {ref: None for scope, (first, _) in stage.blocks.items() if first > 0 for ref in program.runs[scope].carried}


def _gathering_again(program: Program, plan: Plan) -> dict[str, None]:
    """The operators of blocks that do not run again whose backward gathers a weight once more
    (codegen.edges.Reshard.regathers)."""
    return {
        op.name: None
        for op in program.ops.values()
        if op.role == "op"
        for index, ref in enumerate(op.operands)
        if op.needs_again(index)
        and program.is_weight(ref)
        and _gathered(plan.nodes[ref[0]].outs[ref[1]], plan.nodes[op.name].ins[index], plan.mesh)
    }


def _gathered(lies: str, asked: str, sizes: tuple[int, ...]) -> bool:
    """Whether a weight is gathered between two uses of a plan."""
    (src, _), (dst, _) = (text.split("|") for text in (lies, asked))
    if src == dst or any(map(is_placed, parse(dst))):
        return False
    return any(step.kind == "all_gather" for step in steps(parse(src), parse(dst), sizes))


def _separable(program: Program, stage: Stage, arriving: Mapping[Ref, None]) -> bool:
    """Whether each operator with a weight reads something that comes from an earlier stage and has a gradient.

    torch finds the weights' part of a backward from where paths of weights and of received values meet. A branch of
    weights that runs beside what is received (the first self-attention of a decoder that is given the encoder's result)
    is lost.
    """
    ops = program.ops
    below = {ref: None for ref in arriving if ops[ref[0]].call.outs[ref[1]].grad}
    for op in ops.values():
        here = op.name in stage.nodes if not op.scope else op.scope in stage.blocks
        if op.role == "port":
            run = program.runs[op.scope]
            here = here and (run.feeds[run.ports.index(op.name)] in below or stage.blocks[op.scope][0] > 0)
            if here:
                below[op.name, 0] = None
        elif here and op.role == "op" and op.graded:
            if any(ref in below for ref in op.operands):
                below.update({(op.name, i): None for i in range(len(op.call.outs))})
            elif any(op.weight) and not all(op.weight):
                return False
    for scope in stage.blocks:  # what blocks give comes from what they are fed
        below.update(dict.fromkeys(program.runs[scope].carried))
    return True
