"""How each weight lies and is used: the table an engineer checks first.

column      cut at rest and in use, the operator's result is cut with it (Megatron's column-parallel)
row         cut at rest and in use, the operator leaves partial sums (row-parallel)
vocabulary  cut along the vocabulary of an embedding or a loss, with the runtime's own algorithm
gathered    cut at rest, whole in use (ZeRO-3), all at once or in so many tiles
once        cut at rest, gathered once per step (ZeRO-1, ZeRO-2)
moved       cut at rest and in use, along different dims
sliced      whole at rest, cut in use
masked      one rank uses it, the others use zeros: the operator's result is a sum over the ranks
replicated  whole at rest and in use
placed      on one coordinate of the axis only, at rest and in use (operator placement)
sent        on one coordinate at rest or in use, elsewhere or everywhere otherwise
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.codegen.edges import in_pair, out_pair
from autopar.layout import fraction, is_placed, is_shard, show
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.original_names import namings
from autopar.problem.pairs import LayoutPair
from autopar.rules.tiles import tiles


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter (of each instance of a block): `originals` are its names in the model, one per instance; `uses` has
    one entry per mesh axis; `local_bytes` is what one device holds of all its instances."""

    scope: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    layout: str
    uses: tuple[str, ...]
    local_bytes: float
    originals: tuple[str, ...]


def weights(program: Program, plan: Plan) -> list[Weight]:
    """All parameters, in the order of the graph."""
    readers = program.readers
    found = []
    for op in program.ops.values():
        if op.role == "param":
            layout = out_pair(plan, (op.name, 0)).rest
            uses = tuple(
                " + ".join(_words(op, readers, program, plan, axis)) or "unused" for axis in range(len(plan.mesh))
            )
            whole = math.prod(op.call.outs[0].sizes) * op.out_dtypes[0].itemsize * op.count
            found.append(
                Weight(
                    op.scope,
                    op.fqn,
                    tuple(op.call.outs[0].sizes),
                    str(op.out_dtypes[0]).removeprefix("torch."),
                    op.count,
                    show(layout),
                    uses,
                    whole * fraction(layout, plan.mesh),
                    tuple(map(str, op.node.meta.get("fqns") or (op.fqn,))),
                )
            )
    return found


def titles(program: Program) -> dict[str, str]:
    """Scope -> how to say where: `outside of the blocks`, or `of transformer.h.0 ... 11` for a run of them."""
    found = {"": "outside of the blocks" if program.runs else "of the model"}
    for run in program.runs.values():
        paths = [
            path
            for naming in namings(program, run)
            for path in ([naming] if isinstance(naming, str) else naming.values())
            if path
        ]
        last = paths[-1].rsplit(".", 1)[-1] if paths else ""
        found[run.scope] = f"of {paths[0]} ... {last}" if len(paths) > 1 else f"of {paths[0] if paths else run.scope}"
    return found


def _words(
    op: Op, readers: Mapping[Ref, list[tuple[Op, int]]], program: Program, plan: Plan, axis: int
) -> dict[str, None]:
    """How the readers of a weight use it; those of its turned form, where it is only turned or cast."""
    found: dict[str, None] = {}
    for reader, operand in readers.get((op.name, 0), []):
        if reader.name in program.following:
            found |= _words(reader, readers, program, plan, axis)
        else:
            found[_use(out_pair(plan, (op.name, 0)), reader, operand, axis, plan)] = None
    return found


def _use(rest: LayoutPair, reader: Op, operand: int, axis: int, plan: Plan) -> str:
    if axis in rest.gathered:
        return "once"
    lies, asked = rest.value[axis], in_pair(plan, reader.name, operand).value[axis]
    if is_placed(lies) or is_placed(asked):
        return "placed" if lies == asked else "sent"
    if lies == asked:
        return _cut(reader, axis, plan) if is_shard(lies) else "replicated"
    if is_shard(lies):
        return "moved" if is_shard(asked) else "gathered"
    return "masked" if asked.startswith("P") else "sliced"


def _cut(reader: Op, axis: int, plan: Plan) -> str:
    node = plan.nodes[reader.name]
    if node.runs and tiles(node.runs[axis]) > 1:
        return f"gathered in {tiles(node.runs[axis])} tiles"
    if node.runs and node.runs[axis] in VOCABULARY:
        return "vocabulary"
    partial = any(LayoutPair.of(out).value[axis].startswith("P") for out in node.outs)
    return "row" if partial else "column"


VOCABULARY: Mapping[str, None] = {"bag": None, "embedding": None, "cross_entropy": None}
