"""Placed operators (those that a plan runs on one coordinate of an axis): their order, and how they are written.

Statements that stand together and run on the same coordinate become one local function, which `placed` calls there
only:

    def user():                              # on coordinate 0 of gpu
        x = F.linear(ids, self.w["user.weight"])
        return x
    x = placed(0, 0, user, (self.w["user.weight"],), (ids, (b, 64)), mesh=MESH)

Placed operators are written as early as their inputs allow: otherwise a rank would wait in the collective for the
result of the other branch before it has started its own.
"""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from autopar.codegen.edges import Spot, in_pair, out_pair, spot_of
from autopar.codegen.expressions import tuple_text
from autopar.layout import show
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref

if TYPE_CHECKING:
    from autopar.codegen.scope import ScopeWriter


def in_order(gm: fx.GraphModule, scope: str, program: Program, plan: Plan) -> list[fx.Node]:
    """The nodes of `scope`, whose graph is `gm`, in the order of the emitted code, a stable topological one: those with
    a spot as early as their inputs allow, and those of one spot together."""
    nodes, spots = list(gm.graph.nodes), _spots(gm, scope, program, plan)
    if not spots:
        return nodes
    for node in nodes:
        if node.target is operator.getitem and (source := node.all_input_nodes[0]) in spots:
            spots[node] = spots[source]
    left = dict.fromkeys(nodes)
    found: list[fx.Node] = []
    last: Spot | None = None
    while left:
        ready = [n for n in left if not any(i in left for i in n.all_input_nodes) and n.op != "output"] or list(left)
        placed = [n for n in ready if n in spots]
        if placed:
            chosen = next((n for n in placed if spots[n] == last), placed[0])
            last = spots[chosen]
        else:
            needed = _ancestors([n for n in left if n in spots])
            chosen = next((n for n in ready if n in needed), ready[0])
        del left[chosen]
        found.append(chosen)
    return found


def _spots(gm: fx.GraphModule, scope: str, program: Program, plan: Plan) -> dict[fx.Node, Spot]:
    """Where placed nodes run; a run of blocks is where its blocks are."""
    found: dict[fx.Node, Spot] = {}
    for node in gm.graph.nodes:
        is_run = node.op == "call_module"
        op = program.ops[program.runs[str(node.target)].ports[0]] if is_run else program.op_of(node, scope)
        if op is not None and op.role in ("op", "port") and (spot := spot_of(plan.nodes[op.name])):
            found[node] = spot
    return found


def _ancestors(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Everything that `nodes` depend on."""
    found: dict[fx.Node, None] = {}
    pending = list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found[source] = None
                pending.append(source)
    return found


def write_placed(writer: ScopeWriter, ops: Sequence[Op]) -> None:
    """Writes `ops`, all placed on one spot, as one local function and its call."""
    plan, program = writer.context.plan, writer.context.program
    spot = spot_of(plan.nodes[ops[0].name])
    assert spot is not None, "only placed operators are gathered"
    inside = {op.name: op for op in ops}
    given: dict[str, bool] = {}  # operand -> whether it gets a gradient
    like: dict[object, str] = {}
    for op in ops:
        for index, ref in enumerate(op.operands):
            if ref[0] not in inside:
                pair = in_pair(plan, op.name, index)
                name = writer.asked(ref, pair)  # collectives stand in front of the function: all ranks run them
                given[name] = given.get(name, False) or pair.has_grad
                like.setdefault(program.ops[ref[0]].out_dtypes[ref[1]], name)
    results = _results(writer, inside)
    function = writer.fresh(_name(ops))
    writer.say(f"def {function}():", f"on coordinate {spot[1]} of {plan.axes[spot[0]]} only")
    writer.indent += "    "
    for op in ops:
        writer.operator(op)
    names = [writer.names[ref] for ref in results]
    writer.say(f"return {', '.join(names)}")
    writer.indent = writer.indent[:-4]
    outs = [_out(writer, ref, like) for ref in results]
    tracked = [name for name, has_grad in given.items() if has_grad]
    operands = tuple_text(tracked)
    layouts = dict.fromkeys(show(out_pair(plan, ref).value) for ref in results)
    for line in _call(
        f"{', '.join(names)} = placed({spot[0]}, {spot[1]}, {function}, ", operands, f", {', '.join(outs)}, mesh=MESH)"
    ):
        writer.say(line, " ".join(layouts) if line.endswith("mesh=MESH)") else "")
    writer.context.algorithms["placed"] = None
    for op in ops:  # one, where there are probes
        writer.probe(op)


def _call(head: str, operands: str, tail: str) -> list[str]:
    """The call on one line, or with its operands on lines of their own."""
    if len(head + operands + tail) <= 120:
        return [head + operands + tail]
    inside = textwrap.wrap(operands[1:-1].rstrip(",") + ",", 110, break_long_words=False, break_on_hyphens=False)
    return [f"{head}(", *(f"    {line}" for line in inside), f"){tail}"]


def _results(writer: ScopeWriter, inside: Mapping[str, Op]) -> list[Ref]:
    """Values made inside that are read outside."""
    program = writer.context.program
    reads = [ref for op in program.ops.values() if op.name not in inside for ref in op.operands]
    reads += program.given_on
    if writer.context.probes:
        return [(op.name, index) for op in inside.values() for index in range(len(op.call.outs))]
    return [ref for ref in dict.fromkeys(reads) if ref[0] in inside]


def _out(writer: ScopeWriter, ref: Ref, like: Mapping[object, str]) -> str:
    op = writer.context.program.ops[ref[0]]
    dtype = op.out_dtypes[ref[1]]
    return f"({like.get(dtype, dtype)}, {tuple_text(writer.context.local_sizes(ref))})"


def _name(ops: Sequence[Op]) -> str:
    """The path of the module that all of `ops` belong to, as a name."""
    paths = [str(op.node.meta.get("module", "")).split(".") for op in ops]
    common = []
    for parts in zip(*paths, strict=False):
        if len(dict.fromkeys(parts)) > 1:
            break
        common.append(parts[0])
    name = re.sub(r"\W", "_", "_".join(common))
    return f"{name}_branch" if name and not name[0].isdigit() else "branch"
