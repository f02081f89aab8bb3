"""The emitted classes of a pipeline: one per stage, and the model that holds them.

A stage's forward takes what it receives, the inputs and totals that it reads and the sizes, and returns two tuples:
what it sends to the next stage, and the model's results that are made in it. One call is one microbatch. A stage that
differs from an earlier one only by the instances of its blocks is a subclass of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.cluster import Cluster
from autopar.codegen.context import Context
from autopar.codegen.expressions import tuple_text
from autopar.codegen.scope import ScopeWriter
from autopar.codegen.tables import (
    INDENT,
    Names,
    even_lines,
    interface,
    parameter_tables,
    run_table,
    signature,
    size_lines,
)
from autopar.errors import PlanError
from autopar.pipeline import View, views
from autopar.pipeline.microbatches import ancestors
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.stage_views import total_ref
from autopar.problem.graph import Op, Program, Ref, Run


def pipelined_model(context: Context, gm: fx.GraphModule, names: Names) -> str:
    """The stage classes and the model class."""
    found = views(context.program, context.plan)
    _check_buffers(context.program, found)
    _check_draws(context, found)
    bases: dict[tuple[str, ...], int] = {}  # body of a stage class -> the first stage with it
    stages = []
    for view in found:
        does = tuple(_body(context, gm, view, names))
        first = bases.setdefault(does, view.index)
        new = first == view.index
        stages.append(_stage(context, view, len(found), "Stage" if new else f"Stage{first}", does if new else ()))
    return "\n".join([*stages, _model(context, gm, names, len(found))])


def _check_buffers(program: Program, found: Sequence[View]) -> None:
    """Raise PlanError where one stage changes a buffer that another one reads: that one would always read the old
    value."""
    for number, op in enumerate(program.results):
        giving = {view.index for view in found if (number, op) in view.results}
        holding = {view.index for view in found if program.buffers.get(op.fqn) in view.held}
        if op.role == "mutation" and holding - giving:
            raise PlanError(
                f"stage {min(giving)} makes the new value of buffer {op.fqn}, which stage {min(holding - giving)} "
                f"reads ({program.ops[op.operands[0][0]].where}): cut the model in front of what reads the buffer or "
                "behind what changes it, or take one stage"
            )


def _check_draws(context: Context, found: Sequence[View]) -> None:
    """Raise PlanError where stages on different kinds of devices each draw the same value: their generators give
    different numbers for one seed."""
    plan = context.plan
    places = Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh)
    for op in context.program.ops.values():
        on = {
            view.index: places.device(plan.stages[view.index].place)
            for view in found
            if op.draws and view.runs(op.name)
        }
        others = [index for index, device in on.items() if device != next(iter(on.values()))]
        if others:
            raise PlanError(
                f"{op.name} ({op.where}) draws random numbers that stages {min(on)} and {others[0]} read, each for "
                "itself, and these run on devices of two kinds, which would not draw the same: cut the model so that "
                "devices of one kind read them, draw them outside and make them an input, or take a cluster of one "
                "kind"
            )


class StageWriter(ScopeWriter):
    """Writes the top-level operators of one stage; or of the view of totals, which are computed before the
    microbatches."""

    def __init__(self, context: Context, gm: fx.GraphModule, view: View) -> None:
        super().__init__(context, gm, "")
        self.view = view
        for ref in (*view.receives, *view.given):
            self.names[ref] = self.fresh(self._variable(ref))

    def _variable(self, ref: Ref) -> str:
        name = ref[0].rpartition("/")[2]
        return name if len(self.context.program.ops[ref[0]].call.outs) == 1 else f"{name}_{ref[1]}"

    def includes(self, node: fx.Node, op: Op | None) -> bool:
        """Whether `node` is an operator of this stage, a run of which it has instances, or a tensor that these read."""
        if op is None:
            return node.op == "output" or str(node.target) in self.view.blocks
        if op.role == "op":
            return self.view.runs(op.name) and not all(
                (op.name, i) in self.view.given for i in range(len(op.call.outs))
            )
        return op.name in self.view.held or op.name in self.view.inputs

    def first_instance(self, run: Run) -> int:
        """The first instance of `run` in this stage."""
        return self.view.blocks[run.scope][0]

    def instances(self, run: Run) -> int:
        """How many instances of `run` this stage has."""
        first, stop = self.view.blocks[run.scope]
        return stop - first

    def blocks_comment(self, times: int) -> str:
        """Empty: the docstring of the stage has the number, so that stages with other numbers can share the body."""
        return ""

    def again(self, run: Run) -> int:
        """How many of these, counted from the first, are run again in the backward."""
        plan = self.context.plan
        return plan.again(plan.stages[self.view.index], run.scope, self.instances(run))

    def _output(self, node: fx.Node) -> None:
        values = self.results([op for _, op in self.view.results])
        self.say(f"return {tuple_text([self.names[ref] for ref in self.view.sends])}, {tuple_text(values)}")


def _stage(context: Context, view: View, count: int, base: str, does: Sequence[str]) -> str:
    """The class of a stage: its blocks, and the body `does`, empty where the base class has it."""
    return "\n".join(
        [
            "",
            f"class Stage{view.index}({base}):",
            f'{INDENT}"""Stage {view.index} of {count}, on place {context.plan.stages[view.index].place} of '
            f'{context.plan.places}: {_content(context, view)}."""',
            "",
            run_table(context, view.blocks),
            *(("", *does) if does else ()),
            "",
        ]
    )


def _body(context: Context, gm: fx.GraphModule, view: View, names: Names) -> list[str]:
    """The body of a stage class: its tables, `receives` and `forward`."""
    writer = StageWriter(context, gm, view)
    received, given = [[writer.names[ref] for ref in refs] for refs in (view.receives, view.given)]
    lines = writer.write()
    user_names = _user_names(context, names)
    arguments = [*received, *(writer.names[name, 0] for name in view.inputs), *given]
    return [
        f"{INDENT}INPUTS = {tuple(user_names[name] for name in view.inputs)!r}",
        f"{INDENT}TOTALS = {tuple(_key(ref) for ref in view.given)!r}",
        f"{INDENT}RESULTS = {tuple(number for number, _ in view.results)!r}",
        *([] if view.separable else [f"{INDENT}SEPARABLE = False"]),
        *parameter_tables(context, [context.program.ops[name] for name in view.held], view.reached),
        "",
        f"{INDENT}@staticmethod",
        f"{INDENT}def receives({', '.join(context.symbols)}):",
        *(f"{INDENT * 2}{line}" for line in _received(context, view.receives)),
        "",
        signature("forward", arguments, context.symbols),
        *(f"{INDENT * 2}{line}".rstrip() for line in lines),
    ]


def _content(context: Context, view: View) -> str:
    blocks = [f"{stop - first} x {context.class_of(scope)}" for scope, (first, stop) in view.blocks.items()]
    return ", ".join([*blocks, f"{len(view.ops)} operators"] if view.ops else blocks)


def _received(context: Context, refs: Sequence[Ref]) -> list[str]:
    """The return statement of `receives`: local shape, dtype and whether there is a gradient, for each received
    value."""
    rows = []
    for ref in refs:
        op = context.program.ops[ref[0]]
        dtype = str(op.out_dtypes[ref[1]]).removeprefix("torch.")
        rows.append(f'({tuple_text(context.local_sizes(ref))}, "{dtype}", {op.call.outs[ref[1]].grad})')
    return [f"return {tuple_text(rows)}"] if len(rows) < 2 else ["return (", *(f"{INDENT}{row}," for row in rows), ")"]


def _model(context: Context, gm: fx.GraphModule, names: Names, count: int) -> str:
    """The class of the model: the table of stages, the schedule, how microbatches share values, and the totals."""
    plan = context.plan
    schedule = SCHEDULES[plan.schedule]
    whole = replace(context, plan=replace(plan, microbatches=1))  # totals see the batch before it is cut
    writer = StageWriter(whole, gm, _totals_view(context))
    lines = writer.write()[:-1]  # what the totals need, without the return of a stage
    totals = [total_ref(text) for text in plan.totals]
    inputs = [writer.names.get((op.name, 0), op.node.name) for op in context.program.ops.values() if op.role == "input"]
    named = {ref: name for op, name in zip(_inputs(context), inputs, strict=True) for ref in [(op.name, 0)]}
    table = {_key(ref): writer.names[ref] for ref in totals}
    pieces = [
        "",
        "class Model(PipelinedModule):",
        f'{INDENT}"""The sharded model; `INPUTS` lists how each input is cut, `MICRO` how microbatches share inputs '
        'and outputs."""',
        "",
        *interface(context, gm, names),
        f'{INDENT}PIPELINE = Pipeline("{schedule.torch_name}", {schedule.splits_backward}, {plan.microbatches}, '
        f"{tuple(stage.place for stage in plan.stages)})",
        f"{INDENT}STAGES = {tuple_text([f'Stage{i}' for i in range(count)])}",
        f"{INDENT}MICRO = {_micro(context, names)!r}",
        "",
        f"{INDENT}def sizes(self, {', '.join(inputs)}):",
        *(f"{INDENT * 2}{line}" for line in (*size_lines(context, named), *even_lines(context))),
        f"{INDENT * 2}return {{{', '.join(f'{s!r}: {s}' for s in context.symbols)}}}",
        "",
    ]
    if totals:
        pieces += [
            signature("totals", inputs, context.symbols),
            *(f"{INDENT * 2}{line}".rstrip() for line in lines),
            f"{INDENT * 2}return {{{', '.join(f'{key!r}: {name}' for key, name in table.items())}}}",
            "",
        ]
    return "\n".join(pieces)


def _totals_view(context: Context) -> View:
    """The operators that compute the totals, as a stage that sends nothing."""
    ops = context.program.ops
    names = ancestors(context.program, [total_ref(text) for text in context.plan.totals])
    return View(
        -1,
        {n: None for n in names if ops[n].role == "op"},
        {},
        {n: None for n in names if ops[n].role in ("buffer", "constant")},
        {n: None for n in names if ops[n].role == "input"},
        (),
        (),
        (),
        (),
        {},
    )


def _micro(context: Context, names: Names) -> dict[str, str]:
    """How microbatches share each input (by name) and each result (by number): `S0`, `P` or `R`."""
    found = {name: context.micro((op.name, 0)) for name, op in zip(names.inputs, _inputs(context), strict=True)}
    return found | {str(number): context.micro(op.operands[0]) for number, op in enumerate(context.program.results)}


def _inputs(context: Context) -> list[Op]:
    return [op for op in context.program.ops.values() if op.role == "input"]


def _user_names(context: Context, names: Names) -> dict[str, str]:
    return {op.name: name for op, name in zip(_inputs(context), names.inputs, strict=True)}


def _key(ref: Ref) -> str:
    return ref[0] if ref[1] == 0 else f"{ref[0]}:{ref[1]}"
