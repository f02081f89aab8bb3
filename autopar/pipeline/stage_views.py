"""What each stage of a plan computes, holds, receives and sends.

Called by code generation, by the prices of pipelines and by the simulator. Values go from stage to stage in order: a
value that a later stage reads is received and sent on by every stage in between. Where a run of blocks is cut, the
values that its blocks carry on cross the cut under the names of the run's results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.layout import is_placed, parse, steps
from autopar.pipeline.microbatches import ancestors
from autopar.plan import Plan, Stage
from autopar.problem.graph import HOLDERS, Op, Program, Ref
from autopar.problem.tiling import tiled

RESULTS = ("loss", "output", "mutation")
"""Roles of Ops that are results of the model."""


@dataclass(frozen=True)
class View:
    """One stage.

    ops                the top-level operators that run here, by name
    blocks             the instances `[first, stop)` of each run of blocks
    held, inputs       the parameters, buffers and constants, and the inputs, that it reads, in program order
    reached            the parameters among `held` into which it sends a gradient: not those that it reads for a value
                       without one only (a norm of weights among the outputs, a teacher's moving average)
    given              the totals that it reads, computed over the whole batch before the first microbatch
    receives, sends    the values from the stage before, and to the next one
    results            the outputs of the model that are made here, as (number, op)
    """

    index: int
    ops: Mapping[str, None]
    blocks: Mapping[str, tuple[int, int]]
    held: Mapping[str, None]
    inputs: Mapping[str, None]
    given: tuple[Ref, ...]
    receives: tuple[Ref, ...]
    sends: tuple[Ref, ...]
    results: tuple[tuple[int, Op], ...]
    reached: Mapping[str, None]
    separable: bool = True
    """Whether the backward may be split into the part for inputs and that for weights. False where torch would lose the
    gradient of a weight (`_separable`), where blocks run again in the backward, and where it gathers weights again,
    whole or in tiles: these would run, or be gathered, once more for each group of weights."""

    def runs(self, name: str) -> bool:
        """Whether the top-level operator `name` runs here."""
        return name in self.ops

    def grades(self, param: Op) -> bool:
        """Whether it sends a gradient into a parameter that it holds: else it reads that, and nothing comes back."""
        return bool(param.scope) or param.name in self.reached


def views(program: Program, plan: Plan) -> tuple[View, ...]:
    """The views of all stages of `plan`, first to last."""
    totals = [total_ref(text) for text in plan.totals]
    made = [_made(program, stage) for stage in plan.stages]
    owners = _owners(program, made, totals)
    reads = _all_reads(program, plan, owners, totals)
    arriving = _arriving(program, plan, reads, made, totals)
    regathered = (*tiled(plan.runs), *_gathering_again(program, plan))
    found = []
    for index, stage in enumerate(plan.stages):
        ops = dict.fromkeys(stage.nodes)
        names = dict.fromkeys(ref[0] for ref in reads[index])
        holders = {name: None for name, op in program.ops.items() if name in names and op.role in HOLDERS}
        runs_again = any(plan.again(stage, scope, stop - first) for scope, (first, stop) in stage.blocks.items())
        gathers_again = any(name in ops or program.ops[name].scope in stage.blocks for name in regathered)
        results = tuple((i, op) for i, op in _results(program) if index in owners[i])
        found.append(
            View(
                index,
                ops,
                stage.blocks,
                held={n: None for n in holders if program.ops[n].role != "input"},
                inputs={n: None for n in holders if program.ops[n].role == "input"},
                given=tuple(r for r in totals if r in reads[index]),
                receives=tuple(arriving[index]),
                sends=tuple(arriving[index + 1]),
                results=results,
                reached=_reached(program, stage, [op for _, op in results], arriving[index + 1]),
                separable=not runs_again and not gathers_again and _separable(program, stage, arriving[index]),
            )
        )
    return tuple(found)


def _all_reads(program: Program, plan: Plan, owners: list[list[int]], totals: list[Ref]) -> list[dict[Ref, None]]:
    """For each stage the values that it reads: of its operators and blocks, of the results of the model that it makes
    (`owners`), and what it holds although nobody reads it."""
    reads = [_reads(program, stage) for stage in plan.stages]
    for index, op in _results(program):
        buffer = [(program.buffers[op.fqn], 0)] if op.role == "mutation" else []
        for owner in owners[index]:
            reads[owner].update(dict.fromkeys([op.operands[0], *buffer]))
    reads[0].update(dict.fromkeys(_unread(program)))  # the state dict has them
    for index in _firsts(plan) if totals else ():  # every place computes the totals itself
        reads[index].update(
            {(name, 0): None for name in ancestors(program, totals) if program.ops[name].role in ("buffer", "constant")}
        )
    return reads


def _unread(program: Program) -> list[Ref]:
    """The parameters and buffers outside of blocks that nothing reads and no result changes."""
    read = {ref[0] for ref in program.readers} | {feed[0] for run in program.runs.values() for feed in run.feeds}
    changed = {program.buffers[op.fqn] for op in program.results if op.role == "mutation"}
    return [
        (op.name, 0)
        for op in program.ops.values()
        if op.role in ("param", "buffer") and not op.scope and op.name not in read and op.name not in changed
    ]


def _arriving(
    program: Program, plan: Plan, reads: list[dict[Ref, None]], made: list[dict[Ref, None]], totals: list[Ref]
) -> list[dict[Ref, None]]:
    """For each stage the values that it receives, and behind the last one an empty dict. A stage receives what it reads
    or sends on, does not make, and what is neither held by each stage that reads it nor a total."""
    arriving: list[dict[Ref, None]] = [{} for _ in range(len(plan.stages) + 1)]
    for index in reversed(range(len(plan.stages))):
        wanted = {**reads[index], **arriving[index + 1]}
        outside = {
            r: None
            for r in wanted
            if r not in made[index] and r not in totals and program.ops[r[0]].role not in HOLDERS
        }
        arriving[index] = {**_unfinished(program, plan.stages[index]), **outside}
    assert not arriving[0], f"nothing can come before the first stage, but {list(arriving[0])} would"
    return arriving


def whole(program: Program) -> View:
    """The view of a plan that is not cut: all operators, all blocks, all results."""
    top = [op for op in program.ops.values() if not op.scope]
    trained = {op.name: None for op in top if op.role == "param" and op.call.outs[0].grad}
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
        trained,
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
    """The carried values of runs of blocks that began in an earlier stage and go on in this one."""
    return {ref: None for scope, (first, _) in stage.blocks.items() if first > 0 for ref in program.runs[scope].carried}


def _reached(program: Program, stage: Stage, results: Sequence[Op], sends: Mapping[Ref, None]) -> dict[str, None]:
    """The parameters outside of blocks into which a stage sends gradients: those from which its operators lead to the
    loss among its `results`, to its blocks, or to a value with a gradient that it `sends` on."""
    ops, found = program.ops, dict[str, None]()
    back = {ref: None for ref in sends if ops[ref[0]].call.outs[ref[1]].grad}
    back.update({op.operands[0]: None for op in results if op.role == "loss"})
    for op in reversed(ops.values()):
        if op.role == "param" and (op.name, 0) in back:
            found[op.name] = None
        elif op.role == "port" and op.scope in stage.blocks and op.call.outs[0].grad:
            run = program.runs[op.scope]
            if stage.blocks[op.scope][0] == 0 or op.name in run.ports[len(run.carried) :]:
                back[run.feeds[run.ports.index(op.name)]] = None
        elif op.name in stage.nodes and any((op.name, number) in back for number in range(len(op.call.outs))):
            ins = zip(op.operands, op.call.ins, strict=True)
            back.update({ref: None for ref, tensor in ins if tensor.grad})
    return found


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
    """Whether a weight is gathered from the use `lies` to the use `asked` of a plan."""
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
