"""The emitted file: one class per distinct block, one for the model, and what they import.

    emit(gm, plan, ...) -> Python source

The file imports torch and autopar.runtime only. Parameters are declared with their global shape, dtype and layout at
rest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from torch import fx

import autopar
from autopar._torch import OPDEFS, OpOverload
from autopar.codegen.context import Context, function_names
from autopar.codegen.reserved import USED_IN_SCOPES
from autopar.codegen.scope import ScopeWriter
from autopar.codegen.stages import pipelined_model
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
from autopar.frontend.factory import RAN_AS
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Run
from autopar.problem.original_names import first_path, namings
from autopar.problem.read_graph import read
from autopar.rules import TORCH
from autopar.text import gibibytes, inside, seconds

# names that the file imports or defines
RESERVED = (
    "Block",
    "Mesh",
    "Model",
    "Param",
    "Pipeline",
    "PipelinedModule",
    "ShardedModule",
    "Stage",
    "main",
    "registered",
)


def emit(gm: fx.GraphModule, plan: Plan, names: Names, *, probes: bool = False) -> str:
    """The source of the sharded module for `plan`; with `probes`, every value is reported (see `codegen.probes`)."""
    program = read(gm, plan.hints, training=plan.mode == "train", device=plan.device_kind)
    context = Context(program, plan, {}, probes, names.fleeting, names.order)
    alike = dict[str, list[str]]()  # the body of a class -> the runs that it is for: parts of a run may do the same
    for run in program.runs.values():
        alike.setdefault(_block(context, gm, run), []).append(run.scope)
    context.classes.update(_class_names(program, plan, gm, alike.values()))
    bodies = [_class(context, gm, scopes, body) for body, scopes in alike.items()]
    model = pipelined_model(context, gm, names) if plan.pipelined else _model(context, gm, names)
    return "\n".join([_header(context), *bodies, model, _footer()])


def _class_names(program: Program, plan: Plan, gm: fx.GraphModule, alike: Iterable[Sequence[str]]) -> dict[str, str]:
    """scope -> name of its class, one for scopes that are `alike`: the class of the block's module, with a number where
    the name is taken."""
    stages = (f"Stage{i}" for i in range(len(plan.stages)))
    taken = dict.fromkeys([*RESERVED, *USED_IN_SCOPES, *function_names(program), *stages])
    found = {}
    for scopes in alike:
        name = _module_class(gm, program.runs[scopes[0]])
        free = next(
            text for text in itertools.chain([name], (f"{name}{i}" for i in itertools.count(2))) if text not in taken
        )
        taken[free] = None
        found.update(dict.fromkeys(scopes, free))
    return found


def _module_class(gm: fx.GraphModule, run: Run) -> str:
    body, words = gm.get_submodule(run.scope), re.findall(r"[a-zA-Z]+", run.scope)
    assert isinstance(body, fx.GraphModule)
    return str(body.meta["class_name"]) or "".join(map(str.capitalize, words)) + "Block"


def _header(context: Context) -> str:
    """The begin of the file: docstring, imports and the mesh. To be written last, when all marks, functions and
    algorithms that the classes use are noted in `context`."""
    plan = context.plan
    predicted = plan.predicted
    cluster = plan.cluster.get("name", "cluster")
    gap = f", gap {100 * predicted.gap:.1f} %" if predicted.bound_s > 0 else ""
    imports = "\n".join(f"from {module} import {name}" for name, module in sorted(context.functions.items()))
    others = _others(context)
    again = "".join(
        f", {name}"
        for name in (*context.marks, *(["registered"] if others else []), *(["remat"] if plan.remat else []))
    )
    bases = "Pipeline, PipelinedModule, Stage" if plan.pipelined else "ShardedModule"
    places = f", places={plan.places}" if plan.places > 1 else ""
    behind = f", behind={axes}" if (axes := context.edges.behind(plan)) else ""
    mesh = ", ".join(f"{name}={size}" for name, size in zip(plan.axes, plan.mesh, strict=True))
    mesh = mesh or "of one device" if plan.places == 1 else f"{plan.places} places x ({mesh})"
    title = f"{inside(plan.model)} on {inside(cluster)} | mesh {mesh} | {inside(plan.strategy)}"
    sizes = ", ".join(f"{k}={v}" for k, v in plan.hints.items()) or "fixed sizes"
    made_of = f"graph {plan.graph_hash[:12]} | plan {plan.digest} | autopar {autopar.__version__}"
    mesh_text = f'Mesh({tuple(plan.mesh)}, {tuple(plan.axes)}, "{plan.device_kind}"{places}{behind})'
    registers = f"registered({others!r})\n\n" if others else ""
    return f'''"""{title} | {plan.mode}

predicted {seconds(predicted.step_s)} per step, {gibibytes(predicted.memory_bytes)} per device{gap}
planned for {sizes} | {made_of}

Each operator runs on local shards. The comment behind it is the local size of its result and its layout: one entry per
mesh axis, R replicated, S0 cut along dim 0, P a part of a sum.
"""

import torch
import torch.nn.functional as F

from autopar.runtime import Block, Mesh, Param, {bases}, gather, main, reshard{again}
{_algorithms(context)}{imports}{chr(10) if imports else ""}
{registers}MESH = {mesh_text}
'''


def _others(context: Context) -> dict[str, str]:
    """Custom operators (not of torch) -> the module that registers them; "" for a script, or where it is not known."""
    targets = dict.fromkeys(
        op.target
        for op in context.program.ops.values()
        if isinstance(op.target, OpOverload) and op.target.namespace not in TORCH
    )
    made = {target: OPDEFS.get(target._schema.name) for target in targets}
    modules = {target: "" if by is None else by._init_fn.__module__ for target, by in made.items()}
    return {
        str(target): module.removeprefix(RAN_AS) if module != "__main__" else "" for target, module in modules.items()
    }


def _algorithms(context: Context) -> str:
    if not context.algorithms:
        return ""
    return f"from autopar.runtime.algorithms import {', '.join(sorted(context.algorithms))}\n"


def _class(context: Context, gm: fx.GraphModule, scopes: Sequence[str], body: str) -> str:
    """The class of the blocks of runs that do the same."""
    runs = [context.program.runs[scope] for scope in scopes]
    path = first_path(namings(context.program, runs[0])[0]) or scopes[0]
    half = gm.get_submodule(scopes[0]).meta.get("half", "")  # type: ignore[union-attr,operator]
    count = sum(run.count for run in runs)
    instances = f"{count} instances" if count > 1 else "One instance"
    return "\n".join(
        [
            "",
            f"class {context.class_of(scopes[0])}(Block):",
            f'{INDENT}"""{instances} of {inside(path)}{half}."""',
            body,
        ]
    )


def _block(context: Context, gm: fx.GraphModule, run: Run) -> str:
    """The body of the class of the blocks of a run."""
    body = gm.get_submodule(run.scope)
    assert isinstance(body, fx.GraphModule)
    writer = ScopeWriter(context, body, run.scope)
    lines = writer.write()
    ports = [writer.names[port, 0] for port in run.ports]
    return "\n".join(
        [
            "",
            *parameter_tables(context, _ops(context, run.scope)),
            *_mutates(context, run),
            "",
            signature("forward", ports, context.symbols),
            *(f"{INDENT * 2}{line}".rstrip() for line in lines),
            "",
        ]
    )


def _mutates(context: Context, run: Run) -> list[str]:
    """The buffers whose new values forward returns, behind the carried values."""
    names = tuple(context.program.ops[name].fqn for name in run.mutated)
    return [f"{INDENT}MUTATES = {names!r}"] if names else []


def _ops(context: Context, scope: str) -> list[Op]:
    return [op for op in context.program.ops.values() if op.scope == scope]


def _model(context: Context, gm: fx.GraphModule, names: Names) -> str:
    """The class of a model without a pipeline."""
    writer = ScopeWriter(context, gm, "")
    lines = writer.write()
    inputs = [op for op in context.program.ops.values() if op.role == "input"]
    text = [
        "",
        "class Model(ShardedModule):",
        f'{INDENT}"""The sharded model; `INPUTS` lists how each input is cut."""',
        "",
        *interface(context, gm, names),
        *parameter_tables(context, _ops(context, "")),
        run_table(context, {scope: (0, run.count) for scope, run in context.program.runs.items()}),
        "",
        f"{INDENT}def forward(self, {', '.join(writer.names[op.name, 0] for op in inputs)}):",
        *(f"{INDENT * 2}{line}" for line in size_lines(context, writer.names)),
        *(f"{INDENT * 2}{line}" for line in even_lines(context)),
        *(f"{INDENT * 2}{line}".rstrip() for line in lines),
        "",
    ]
    return "\n".join(text)


def _footer() -> str:
    return """
if __name__ == "__main__":  # torchrun --nproc-per-node=<ranks> sharded.py
    main(Model)
"""
