"""Plans whose weights are gathered in tiles because a test says so, whatever their size."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture import Captured
from autopar.codegen.edges import in_pair
from autopar.layout import dim_of, is_shard
from autopar.plan import Plan
from autopar.problem.graph import Op, Program
from autopar.problem.pairs import LayoutPair
from autopar.problem.read_graph import read
from autopar.problem.tiling import tileable
from autopar.rules.tiles import NAMES, OPERATORS, name


def in_tiles(captured: Captured, made: Plan, count: int) -> Plan:
    """`made` with every weight that one axis gathers whole for a product of its own rows gathered in `count` tiles
    instead, where they cut it evenly."""
    program = read(captured.gm, made.micro_hints, training=made.mode == "train")
    nodes = {
        **made.nodes,
        **{op: replace(made.nodes[op], **changed) for op, changed in _tiled(program, made, count).items()},
    }
    assert nodes != made.nodes, "nothing is gathered that so many tiles cut evenly"
    return replace(made, nodes=nodes)


def _tiled(program: Program, made: Plan, count: int) -> dict[str, dict[str, tuple[str, ...]]]:
    found = {}
    for op in program.ops.values():
        node = made.nodes[op.name]
        if not tileable(op) or node.outs[0].startswith("O"):
            continue
        at = NAMES[OPERATORS[op.target]]
        rows, weight = in_pair(made, op.name, 1 - at), in_pair(made, op.name, at)
        axes = [
            a
            for a, kind in enumerate(node.kinds)
            if kind == "sample" and is_shard(rows.value[a]) and weight.value[a] == "R"
        ]
        if (
            axes
            and not any(is_shard(e) and dim_of(e) == 0 for e in weight.value)
            and op.call.ins[at].sizes[0] % (made.mesh[axes[-1]] * count) == 0
        ):
            found[op.name] = _changed(made, op, at, axes[-1], count)
    return found


def _changed(made: Plan, op: Op, at: int, axis: int, count: int) -> dict[str, tuple[str, ...]]:
    node, weight, run = made.nodes[op.name], in_pair(made, op.name, at), name(op.target, count)
    rest = "S0" if weight.grad[axis] == "P" else weight.grad[axis]
    pair = LayoutPair(_put(weight.value, axis, "S0"), _put(weight.grad, axis, rest))
    return {
        "ins": _put(node.ins, at, str(pair)),
        "runs": _put(node.runs, axis, run),
        "factors": _put(node.factors, axis, f"{node.factors[axis]}/{run}"),
    }


def _put(texts: tuple[str, ...], at: int, text: str) -> tuple[str, ...]:
    return (*texts[:at], text, *texts[at + 1 :])
