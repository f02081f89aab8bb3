"""Bytes that ran against bytes that were priced, where every cut is even (prices take uneven cuts as even)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from autopar.codegen.edges import Edges, Pair
from autopar.cost.comm import group_bytes
from autopar.layout import Layout, cutters
from autopar.plan import NodePlan, Plan
from autopar.problem.graph import Op, Program
from autopar.rules.algorithms import ALGORITHMS
from autopar.rules.language import Option, Use
from autopar.rules.site import Site
from autopar.runtime.count import Counted
from autopar.verify.collectives import MOVING, Key, moving


def priced_bytes(program: Program, plan: Plan, edges: Edges) -> Counter[Key] | None:
    """Bytes of all collectives of each kind on each axis, as the cost model counts them, at the sizes of `program`; None where
    some tensor that is moved is cut unevenly."""
    found: Counter[Key] = Counter()
    for reshard in edges.reshards:
        steps, full = moving(reshard, plan.mesh), program.bytes_of(reshard.ref)
        sizes = program.ops[reshard.ref[0]].call.outs[reshard.ref[1]].sizes
        if not all(_even(sizes, layout, plan.mesh) for step in steps for layout in (step.before, step.after)):
            return None
        for step in steps:
            found[step.kind, step.axis] += round(group_bytes(step, full, plan.mesh)) * reshard.count
    for name, node in plan.nodes.items():
        for axis, run in enumerate(node.runs):
            if run:
                _inside(found, program.ops[name], node, axis, plan.mesh)
    return found


def ran_bytes(seen: Iterable[Counted]) -> Counter[Key]:
    """The same for what really ran, as one rank counted it."""
    found: Counter[Key] = Counter()
    for item in seen:
        if item.kind in MOVING:
            found[item.kind, item.axis] += item.bytes
    return found


def _inside(found: Counter[Key], op: Op, node: NodePlan, axis: int, mesh: tuple[int, ...]) -> None:
    """Add the collectives that the runtime algorithm of `op` runs on `axis`."""
    site = Site(op.call.ins, _options(node, len(mesh)), mesh, axis)
    for inner in ALGORITHMS[node.runs[axis]].inner(training=any(t.grad for t in op.call.outs)):
        found[inner.kind, axis] += round(inner.nbytes(site)) * op.count


def _options(node: NodePlan, axes: int) -> list[Option]:
    """The options that a plan's node stands for, one per axis."""
    def uses(texts: tuple[str, ...], axis: int) -> tuple[Use, ...]:
        return tuple(Use(pair.value[axis], pair.grad[axis]) for pair in map(Pair.of, texts))

    return [Option(node.factors[a], uses(node.ins, a), uses(node.outs, a), node.runs[a]) for a in range(axes)]


def _even(sizes: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> bool:
    return all(size % math.prod(mesh[a] for a in cutters(layout, dim)) == 0 for dim, size in enumerate(sizes))
