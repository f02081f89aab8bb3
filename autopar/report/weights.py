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
from autopar.cost.memory import itemsize, rests_in
from autopar.layout import fraction, is_placed, is_shard, show
from autopar.memory.at_rest import instances
from autopar.memory.shares import Shares
from autopar.pipeline.stage_views import views, whole
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.original_names import namings
from autopar.problem.pairs import LayoutPair
from autopar.rules.tiles import tiles


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter (of each instance of a block): `originals` are its names in the model, one per instance; `dtype`
    and `layout` are those at rest; `uses` has one entry per mesh axis; `local_bytes` is what rests on a device of the
    place that has the most of its instances."""

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
    readers, counts = program.readers, _instances(program, plan)
    found = []
    for op in program.ops.values():
        if op.role == "param":
            layout = out_pair(plan, (op.name, 0)).rest
            uses = tuple(
                " + ".join(_words(op, readers, program, plan, axis)) or "unused" for axis in range(len(plan.mesh))
            )
            dtype = str(op.out_dtypes[0]).removeprefix("torch.")
            if plan.mode == "train" and op.call.outs[0].grad:
                dtype = rests_in(dtype, plan.precision)
            full = math.prod(op.call.outs[0].sizes) * itemsize(dtype) * counts[op.name]
            found.append(
                Weight(
                    op.scope,
                    op.fqn,
                    tuple(op.call.outs[0].sizes),
                    dtype,
                    op.count,
                    show(layout),
                    uses,
                    full * fraction(layout, plan.mesh),
                    tuple(map(str, op.node.meta.get("fqns") or (op.fqn,))),
                )
            )
    return found


def _instances(program: Program, plan: Plan) -> dict[str, int]:
    """How many tensors of each parameter a device holds, on the place that has the most of them."""
    shares, stages = Shares(program, plan), views(program, plan) if len(plan.stages) > 1 else (whole(program),)
    places = [instances(shares, [stages[number] for number in plan.stages_on(place)]) for place in range(plan.places)]
    return {name: max(counts[name] for counts in places) for name in places[0]}


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
