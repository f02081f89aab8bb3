"""The tables of an emitted class: parameters, inputs and outputs, runs of blocks; and the sizes that its forward reads
off."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from autopar.codegen.context import Context
from autopar.codegen.edges import out_pair
from autopar.codegen.expressions import literal
from autopar.codegen.order import compact, order_text, ranked
from autopar.cost.memory import POLICIES, rests_in
from autopar.layout import show
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op, Ref
from autopar.problem.original_names import namings
from autopar.text import quoted
from passes import edit, facts
from passes.grads import needs_grad

if TYPE_CHECKING:
    from autopar.capture import Captured

INDENT = "    "


@dataclass(frozen=True)
class Names:
    """What emission needs beside the graph; the fields are those of capture.Captured.

    inputs       names of the inputs, in the order of the graph's placeholders
    structure    pytree of the outputs, with output numbers as leaves
    aliases      tied parameters: other name -> the name that the graph uses
    fleeting     buffers that the state dict does not hold
    order        the names of the state dict, in its order
    fixed        plain arguments that are part of the graph: name -> (place among all arguments, value)
    unevaluated  why the program cannot run in evaluation mode; empty where it can
    changing     buffers that an evaluation changes too
    momenta      batch norm -> its momentum
    nested       arguments that hold several inputs, or have another name than their input
    """

    inputs: tuple[str, ...]
    structure: Any
    aliases: Mapping[str, str]
    fleeting: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    unevaluated: str = ""
    changing: tuple[str, ...] = ()
    momenta: Mapping[str, float] = field(default_factory=dict)
    nested: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(captured: Captured) -> Names:
        """Those of a captured model."""
        return Names(
            tuple(captured.input_names),
            captured.structure,
            dict(captured.aliases),
            captured.fleeting,
            captured.order,
            dict(captured.fixed),
            captured.evaluation.why,
            captured.evaluation.changing,
            dict(captured.momenta),
            dict(captured.nested),
        )


def parameter_tables(context: Context, ops: Sequence[Op], reached: Container[str] | None = None) -> list[str]:
    """The tables PARAMS and BUFFERS of one class, which reads `ops`; a stage says which `reached` ones it sends
    gradients into."""
    lines = []
    for title, roles in (("PARAMS", ("param",)), ("BUFFERS", ("buffer", "constant"))):
        held = ranked([op for op in ops if op.role in roles], context.order)
        if not held:
            continue
        lines.append(f"{INDENT}{title} = {{")
        lines += [
            f"{INDENT * 2}{_parameter(context, op, reached=reached is None or op.name in reached)}," for op in held
        ]
        lines.append(f"{INDENT}}}")
    return lines


_ON_HOST = {"": "", "optimizer": ", host_state=True", "parameters": ", host=True"}


def _parameter(context: Context, op: Op, *, reached: bool) -> str:
    """The entry of one parameter or buffer in PARAMS or BUFFERS; `reached`: the class sends a gradient into it."""
    lies = out_pair(context.plan, (op.name, 0))
    layout = lies.rest if op.role == "param" else lies.value
    leaf = f', leaf="{show(lies.value)}"' if lies.value != layout else ""
    leaf += ", each=True" if leaf and EACH in context.plan.nodes[op.name].runs else ""
    own = str(op.out_dtypes[0]).removeprefix("torch.")
    dtype = rests_in(own, context.plan.precision) if op.call.outs[0].grad else own
    leaf += f', compute="{own}"' if dtype != own else ""
    if facts.is_trained(op.node):
        leaf += _ON_HOST[context.plan.offload]
    shape = tuple(op.call.outs[0].sizes)
    sync = context.edges.sync.get((op.name, 0), ())
    grad = ", trainable=False" if op.role == "param" and not facts.is_trained(op.node) else ""
    grad += ", reached=False" if op.role == "param" and op.call.outs[0].grad and not reached else ""
    return (
        f'{quoted(context.short_name(op))}: Param({shape}, "{dtype}", "{show(layout)}"{leaf}'
        f"{f', sync={sync}' if sync else ''}{grad}{_persistent(context, op)})"
    )


def _persistent(context: Context, op: Op) -> str:
    """Constants and buffers that the model's state dict does not hold are not in the emitted one's either."""
    names = op.node.meta.get("fqns") or [op.fqn]
    fleeting = op.role == "constant" or (op.role == "buffer" and names[0] in context.fleeting)
    return ", persistent=False" if fleeting else ""


def interface(context: Context, gm: fx.GraphModule, names: Names) -> list[str]:
    """The tables of a model class about its inputs, outputs and modes."""
    inputs = [op for op in context.program.ops.values() if op.role == "input"]
    layouts = {
        name: show(out_pair(context.plan, (op.name, 0)).value) for name, op in zip(names.inputs, inputs, strict=True)
    }
    results = tuple((op.role, op.fqn) for op in context.program.results)
    return [
        f"{INDENT}MESH = MESH",
        f"{INDENT}INPUTS = {layouts!r}",
        *([f"{INDENT}FIXED = {{{_fixed(names)}}}"] if names.fixed else []),
        *([f"{INDENT}NESTED = {dict(names.nested)!r}"] if names.nested else []),
        f"{INDENT}SAMPLE = {_sample(names, inputs)!r}",
        *([f"{INDENT}MIXED = True"] if context.plan.precision in POLICIES else []),
        f"{INDENT}DIMS = {_dims(context, names, inputs)!r}",
        *([f"{INDENT}SIZES = {spans!r}"] if (spans := _spans(context, inputs)) else []),
        f"{INDENT}OUTPUTS = {results}",
        *([f"{INDENT}UNGRADED = {ungraded}"] if (ungraded := _ungraded(context, gm)) else []),
        *([f"{INDENT}STRUCTURE = {names.structure!r}"] if names.structure is not None else []),
        f"{INDENT}ALIASES = {dict(names.aliases)!r}",
        *([f"{INDENT}ORDER = {order_text(context)}"] if names.order else []),
        *_evaluation(context, names),
    ]


def _fixed(names: Names) -> str:
    """Arguments that are part of the program, as the items of a dict."""
    return ", ".join(f"{name!r}: ({place}, {literal(value)})" for name, (place, value) in names.fixed.items())


def _evaluation(context: Context, names: Names) -> list[str]:
    """What a model that trains says of its evaluation, and of its batch norms."""
    if context.plan.mode != "train":
        return [f"{INDENT}TRAINS = False"]
    return [
        *([f"{INDENT}NORMS = {dict(names.momenta)!r}"] if names.momenta else []),
        *([f"{INDENT}UNEVALUATED = {names.unevaluated!r}"] if names.unevaluated else []),
        *([f"{INDENT}CHANGING = {names.changing!r}"] if names.changing else []),
    ]


def _ungraded(context: Context, gm: fx.GraphModule) -> tuple[int, ...]:
    """The numbers of outputs that have a gradient on one device and not here: all but the loss, and in a pipeline,
    whose forward has no gradients, the loss too."""
    if context.plan.mode != "train":
        return ()
    graded, kinds = needs_grad(gm), [entry["kind"] for entry in gm.meta["outputs"] if entry["kind"] != "mutation"]
    given = list(zip(edit.results(gm), kinds, strict=True))
    losses = {node for node, kind in given if kind == "loss" and not context.plan.pipelined}
    return tuple(number for number, (node, _) in enumerate(given) if graded[node] and node not in losses)


def _sample(names: Names, inputs: Sequence[Op]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The planned sizes and dtype of each input."""
    return {
        name: (tuple(op.call.outs[0].sizes), str(op.out_dtypes[0]).removeprefix("torch."))
        for name, op in zip(names.inputs, inputs, strict=True)
    }


def _dims(context: Context, names: Names, inputs: Sequence[Op]) -> dict[str, tuple[str | int | None, ...]]:
    """Input -> its global sizes: numbers, names of symbols, and None for formulas of symbols."""
    return {
        name: tuple(
            size if isinstance(size, int) else str(size) if str(size) in context.symbols else None
            for size in op.call.outs[0].shape
        )
        for name, op in zip(names.inputs, inputs, strict=True)
    }


def _spans(context: Context, inputs: Sequence[Op]) -> dict[str, tuple[int, int | None, int]]:
    """Symbol -> (least size, greatest size or None, what the size must be a multiple of); without symbols that may have
    any size."""
    found = facts.spans(inputs[0].node.graph.owning_module) if inputs else {}
    return {name: span for name, span in found.items() if name in context.symbols and span != (0, None, 1)}


def run_table(context: Context, blocks: Mapping[str, tuple[int, int]]) -> str:
    """The table RUNS: for each run of blocks its class and the names of the instances `[first, stop)`. And FIRST: the
    numbers with which runs that draw random numbers begin, so that each block draws as itself."""
    rows = [
        f"{scope!r}: ({context.class_of(scope)}, "
        f"{compact(namings(context.program, context.program.runs[scope])[slice(*span)])})"
        for scope, span in blocks.items()
    ]
    drawing = dict.fromkeys(op.scope for op in context.program.ops.values() if op.draws)
    numbers = {
        scope: context.program.runs[scope].begins + first for scope, (first, _) in blocks.items() if scope in drawing
    }
    first = {scope: number for scope, number in numbers.items() if number}
    return f"{INDENT}RUNS = {{{', '.join(rows)}}}" + (f"\n{INDENT}FIRST = {first}" if first else "")


def size_lines(context: Context, names: Mapping[Ref, str]) -> list[str]:
    """`b = input_ids.shape[0] * 4`: the global sizes, from the local inputs called `names`."""
    found = [_size_line(context, names, symbol) for symbol in context.symbols]
    return [line for line in found if line]


def even_lines(context: Context) -> list[str]:
    """The checks of sizes that must divide, in a forward of its own for each microbatch."""
    microbatches, lines = context.plan.microbatches, []
    for (size, axes, parts), why in context.even.items():
        found = re.sub(r"\bb\b", f"(b // {microbatches})", size) if parts == 1 < microbatches else size
        lines.append(f"MESH.even({size!r}, {found}, {axes}, {why!r}{f', parts={parts}' if parts > 1 else ''})")
    return lines


def _size_line(context: Context, names: Mapping[Ref, str], symbol: str) -> str | None:
    """The line that computes the global size `symbol` from the local size of an input that has it; None where none
    has."""
    for op in context.program.ops.values():
        if op.role != "input":
            continue
        layout = out_pair(context.plan, (op.name, 0)).value
        for dim, size in enumerate(op.call.outs[0].shape):
            if str(size) == symbol:
                ways = math.prod(n for entry, n in zip(layout, context.sizes, strict=True) if entry == f"S{dim}")
                return f"{symbol} = {names[op.name, 0]}.shape[{dim}]{f' * {ways}' if ways > 1 else ''}"
    return None


def signature(name: str, arguments: Iterable[str], symbols: Iterable[str]) -> str:
    """The line that begins a method of a block or stage: values by position, sizes by name."""
    sizes = list(symbols)
    return f"{INDENT}def {name}({', '.join(['self', *arguments, *(['*'] if sizes else []), *sizes])}):"
