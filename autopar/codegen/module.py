"""The emitted file: one class per distinct block, one for the model, and what they import.

    emit(gm, plan, ...) -> Python source

The file imports torch and autopar.runtime only. Parameters are declared with their global shape, dtype and layout at rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

import autopar
from autopar.codegen.context import Context
from autopar.codegen.edges import out_pair
from autopar.codegen.order import compact, order_text, ranked
from autopar.codegen.scope import ScopeWriter
from autopar.layout import is_shard, show
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Run, read

if TYPE_CHECKING:
    from autopar.capture import Captured

INDENT = "    "
RESERVED = ("Block", "Mesh", "Model", "Param", "ShardedModule", "F", "MESH")  # names that the file itself uses for other things


@dataclass(frozen=True)
class Names:
    """What the graph itself does not say: pytree of the outputs, aliases of tied parameters, which buffers no state dict
    holds, the names of the state dict in the order of the model, and arguments that are part of the graph."""

    inputs: tuple[str, ...]
    structure: Any
    aliases: Mapping[str, str]
    fleeting: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[int, Any]] = field(default_factory=dict)

    @staticmethod
    def of(captured: Captured) -> Names:
        """Those of a captured model."""
        return Names(tuple(captured.input_names), captured.structure, dict(captured.aliases), captured.fleeting, captured.order,
                     dict(captured.fixed))


def emit(gm: fx.GraphModule, plan: Plan, names: Names, *, probes: bool = False) -> str:
    """The source of the sharded module for `plan`; with `probes`, every value is reported (see `codegen.probes`)."""
    program = read(gm, plan.hints, training=plan.mode == "train")
    context = Context(program, plan, _class_names(program), probes, names.fleeting, names.order)
    bodies = [_block(context, gm, run) for run in program.runs.values()]
    model = _model(context, gm, names)
    return "\n".join([_header(context), *bodies, model, _footer()])


def _class_names(program: Program) -> dict[str, str]:
    """A readable class name per scope: the class of the block's module, made unique among all names of the file."""
    taken = dict.fromkeys(RESERVED, 1)
    found = {}
    for run in program.runs.values():
        name = _module_class(program, run)
        taken[name] = taken.get(name, 0) + 1
        found[run.scope] = name if taken[name] == 1 else f"{name}{taken[name]}"
    return found


def _module_class(program: Program, run: Run) -> str:
    for op in program.ops.values():
        stack = op.node.meta.get("nn_module_stack") if op.scope == run.scope else None
        for path, kind in (stack or {}).values():
            if re.search(r"\.\d+$", str(path)):
                text = kind if isinstance(kind, str) else kind.__name__
                return str(text).rsplit(".", 1)[-1]
    return "".join(part.capitalize() for part in re.findall(r"[a-zA-Z]+", run.scope)) + "Block"


def _header(context: Context) -> str:
    plan = context.plan
    predicted = plan.predicted
    cluster = plan.cluster.get("name", "cluster")
    gap = f", gap {100 * predicted.gap:.1f} %" if predicted.bound_s > 0 else ""
    imports = "\n".join(f"from {module} import {name}" for name, module in sorted(context.functions.items()))
    mesh = ", ".join(f"{name}={size}" for name, size in zip(plan.axes, plan.mesh, strict=True))
    return f'''"""{plan.model} on {cluster} | mesh {mesh or "of one device"} | {plan.strategy} | {plan.mode}

predicted {predicted.step_s:.4g} s/step, {predicted.memory_bytes / 2**30:.3g} GiB per device{gap}
planned for {", ".join(f"{k}={v}" for k, v in plan.hints.items()) or "fixed sizes"} | graph {plan.graph_hash[:12]} | plan {plan.digest} | autopar {autopar.__version__}

Each operator runs on local shards. The comment behind it is the local size of its result and its layout: one entry per
mesh axis, R replicated, S0 cut along dim 0, P a part of a sum.
"""

import torch
import torch.nn.functional as F

from autopar.runtime import Block, Mesh, Param, ShardedModule, gather, main, reshard
{_algorithms(context)}{imports}{chr(10) if imports else ""}
MESH = Mesh({tuple(plan.mesh)}, {tuple(plan.axes)}, "{_device_type(plan)}")
'''


def _device_type(plan: Plan) -> str:
    return str(plan.cluster.get("device", {}).get("kind", "cpu"))


def _algorithms(context: Context) -> str:
    if not context.algorithms:
        return ""
    return f"from autopar.runtime.algorithms import {', '.join(sorted(context.algorithms))}\n"


def _block(context: Context, gm: fx.GraphModule, run: Run) -> str:
    body = gm.get_submodule(run.scope)
    assert isinstance(body, fx.GraphModule)
    writer = ScopeWriter(context, body, run.scope)
    lines = writer.write()
    ports = [writer.names[port, 0] for port in run.ports]
    symbols = "".join(f", {s}" for s in context.symbols)
    return "\n".join([
        "", f"class {context.class_of(run.scope)}(Block):",
        f'{INDENT}"""{run.count} instances of {_path(context, run)}."""', "",
        *_parameters(context, run.scope), *_mutates(context, run), "",
        f"{INDENT}def forward(self, {', '.join(ports)}{', *' if symbols else ''}{symbols}):",
        *(f"{INDENT * 2}{line}".rstrip() for line in lines), ""])


def _mutates(context: Context, run: Run) -> list[str]:
    """The buffers whose new values forward returns, behind the carried values."""
    names = tuple(context.program.ops[name].fqn for name in run.mutated)
    return [f"{INDENT}MUTATES = {names!r}"] if names else []


def _path(context: Context, run: Run) -> str:
    names = [op.node.meta["fqns"][0] for op in context.program.ops.values()
             if op.scope == run.scope and op.role == "param" and op.node.meta.get("fqns")]
    return names[0].split(".")[0] + " ..." if not names else names[0].removesuffix("." + _short(context, run))


def _short(context: Context, run: Run) -> str:
    return next(context.short_name(op) for op in context.program.ops.values() if op.scope == run.scope and op.role == "param")


def _parameters(context: Context, scope: str) -> list[str]:
    """The tables PARAMS and BUFFERS of one class."""
    lines = []
    for title, roles in (("PARAMS", ("param",)), ("BUFFERS", ("buffer", "constant"))):
        ops = ranked([op for op in context.program.ops.values() if op.scope == scope and op.role in roles], context.order)
        if not ops:
            continue
        lines.append(f"{INDENT}{title} = {{")
        lines += [f"{INDENT * 2}{_parameter(context, op)}," for op in ops]
        lines.append(f"{INDENT}}}")
    return lines


def _parameter(context: Context, op: Op) -> str:
    layout = out_pair(context.plan, (op.name, 0)).value
    dtype = str(op.out_dtypes[0]).removeprefix("torch.")
    shape = tuple(op.call.outs[0].sizes)
    sync = context.edges.sync.get((op.name, 0), ())
    grad = "" if op.role != "param" or op.node.meta.get("requires_grad", True) else ", trainable=False"
    return (f'"{context.short_name(op)}": Param({shape}, "{dtype}", "{show(layout)}"'
            f"{f', sync={sync}' if sync else ''}{grad}{_persistent(context, op)})")


def _persistent(context: Context, op: Op) -> str:
    """Constants and buffers that the model's state dict does not hold are not in the emitted one's either."""
    names = op.node.meta.get("fqns") or [op.fqn]
    fleeting = op.role == "constant" or (op.role == "buffer" and names[0] in context.fleeting)
    return ", persistent=False" if fleeting else ""


def _model(context: Context, gm: fx.GraphModule, names: Names) -> str:
    writer = ScopeWriter(context, gm, "")
    lines = writer.write()
    inputs = [op for op in context.program.ops.values() if op.role == "input"]
    results = context.program.results
    layouts = {op.node.name: out_pair(context.plan, (op.name, 0)).value for op in inputs}
    runs = {run.scope: f"({context.class_of(run.scope)}, {_prefixes(context, run)})" for run in context.program.runs.values()}
    text = [
        "", "class Model(ShardedModule):",
        f'{INDENT}"""The sharded model; `INPUTS` lists how each input is cut."""', "",
        f"{INDENT}MESH = MESH",
        f"{INDENT}INPUTS = {{{', '.join(f'{n!r}: {show(layouts[op.node.name])!r}' for n, op in zip(names.inputs, inputs, strict=True))}}}",
        *([f"{INDENT}FIXED = {dict(names.fixed)!r}"] if names.fixed else []),
        f"{INDENT}SAMPLE = {_sample(names, inputs)!r}",
        f"{INDENT}OUTPUTS = {tuple((op.role, op.fqn) for op in results)}",
        *([f"{INDENT}STRUCTURE = {names.structure!r}"] if names.structure is not None else []),
        f"{INDENT}ALIASES = {dict(names.aliases)!r}",
        *([f"{INDENT}ORDER = {order_text(context)}"] if names.order else []),
        *_parameters(context, ""),
        f"{INDENT}RUNS = {{{', '.join(f'{scope!r}: {value}' for scope, value in runs.items())}}}", "",
        f"{INDENT}def forward(self, {', '.join(writer.names[op.name, 0] for op in inputs)}):",
        *(f"{INDENT * 2}{line}" for line in _size_lines(context, writer, inputs)),
        *(f"{INDENT * 2}MESH.even({size!r}, {size}, {axes}, {why!r})" for (size, axes), why in context.even.items()),
        *(f"{INDENT * 2}{line}".rstrip() for line in lines), ""]
    return "\n".join(text)


def _sample(names: Names, inputs: Sequence[Op]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The planned sizes and dtype of each input."""
    return {name: (tuple(op.call.outs[0].sizes), str(op.out_dtypes[0]).removeprefix("torch.")) for name, op in zip(names.inputs, inputs, strict=True)}


def _prefixes(context: Context, run: Run) -> str:
    """The module paths of the instances, as a compact expression where they count up."""
    return compact(context.prefixes(run))


def _size_lines(context: Context, writer: ScopeWriter, inputs: Sequence[Op]) -> list[str]:
    """`b = input_ids.shape[0] * 4`: the global sizes, from the local inputs."""
    lines = []
    for symbol in context.symbols:
        found = _size_line(context, writer, inputs, symbol)
        if found:
            lines.append(found)
    return lines


def _size_line(context: Context, writer: ScopeWriter, inputs: Sequence[Op], symbol: str) -> str | None:
    for op in inputs:
        layout = out_pair(context.plan, (op.name, 0)).value
        for dim, size in enumerate(op.call.outs[0].shape):
            if str(size) == symbol:
                ways = 1
                for entry, n in zip(layout, context.sizes, strict=True):
                    ways *= n if is_shard(entry) and entry == f"S{dim}" else 1
                return f"{symbol} = {writer.names[op.name, 0]}.shape[{dim}]{f' * {ways}' if ways > 1 else ''}"
    return None


def _footer() -> str:
    return '''
if __name__ == "__main__":  # torchrun --nproc-per-node=<ranks> sharded.py
    main(Model)
'''
