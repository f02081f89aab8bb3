"""Plans whose weights are gathered in tiles because a test says so, whatever their size."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture import Captured
from autopar.codegen.edges import Pair, in_pair
from autopar.layout import is_shard
from autopar.plan import Plan
from autopar.problem.graph import Program, read
from autopar.problem.tiling import tileable
from autopar.rules.tiles import ROWS, WEIGHT, name


def in_tiles(captured: Captured, made: Plan, count: int) -> Plan:
    """`made` with every weight that one axis gathers whole for a product of its own rows gathered in `count` tiles instead, where they cut it evenly."""
    program = read(captured.gm, made.micro_hints, training=made.mode == "train")
    nodes = {**made.nodes, **{op: replace(made.nodes[op], **changed) for op, changed in _tiled(program, made, count).items()}}
    assert nodes != made.nodes, "nothing is gathered that so many tiles cut evenly"
    return replace(made, nodes=nodes)


def _tiled(program: Program, made: Plan, count: int) -> dict[str, dict[str, tuple[str, ...]]]:
    found = {}
    for op in program.ops.values():
        node = made.nodes[op.name]
        if not tileable(op) or node.outs[0].startswith("O"):
            continue
        rows, weight = in_pair(made, op.name, ROWS), in_pair(made, op.name, WEIGHT)
        axes = [a for a, kind in enumerate(node.kinds) if kind == "sample" and is_shard(rows.value[a]) and weight.value[a] == "R"]
        if axes and "S0" not in weight.value and op.call.ins[WEIGHT].sizes[0] % (made.mesh[axes[-1]] * count) == 0:
            found[op.name] = _changed(made, op.name, weight, axes[-1], count)
    return found


def _changed(made: Plan, op: str, weight: Pair, axis: int, count: int) -> dict[str, tuple[str, ...]]:
    node, rest = made.nodes[op], "S0" if weight.grad[axis] == "P" else weight.grad[axis]
    pair = Pair(_put(weight.value, axis, "S0"), _put(weight.grad, axis, rest))
    return {"ins": _put(node.ins, WEIGHT, str(pair)), "runs": _put(node.runs, axis, name(count)),
            "factors": _put(node.factors, axis, f"{node.factors[axis]}/{name(count)}")}


def _put(texts: tuple[str, ...], at: int, text: str) -> tuple[str, ...]:
    return (*texts[:at], text, *texts[at + 1:])
