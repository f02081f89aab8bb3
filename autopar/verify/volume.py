"""Bytes that ran against bytes that were priced, where every cut is even (prices take uneven cuts as even)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autopar.codegen.edges import Edges
from autopar.codegen.tally import Tally
from autopar.cost.comm import group_bytes
from autopar.layout import even
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.rules.algorithms import ALGORITHMS
from autopar.runtime.count import Counted
from autopar.verify.collectives import MOVING, Key, inside, moving


def priced_bytes(program: Program, plan: Plan, edges: Edges) -> Counter[Key] | None:
    """Bytes of all collectives of each kind on each axis, as the cost model counts them, at the sizes of `program`; None where
    some tensor that is moved is cut unevenly."""
    found: Counter[Key] = Counter()
    tally = Tally(program, plan)
    for reshard, runs, first in tally.reshards(edges.reshards):
        steps, full = moving(reshard, plan.mesh), program.bytes_of(reshard.ref)
        sizes = program.ops[reshard.ref[0]].call.outs[reshard.ref[1]].sizes
        if not all(even(sizes, layout, plan.mesh) for step in steps for layout in (step.before, step.after)):
            return None
        for count, each in ((runs - first, steps), (first, moving(reshard.in_first, plan.mesh))):
            for step in each:
                found[step.kind, step.axis] += round(group_bytes(step, full, plan.mesh)) * count
    for name, node in plan.nodes.items():
        for times, again, first in tally.operators(name, again=edges.runs_again(program.ops[name])):
            for site, inner in inside(program.ops[name], node, plan.mesh, again=again, first=first):
                if not all(map(site.even, ALGORITHMS[node.runs[site.axis]].travels)):
                    return None
                found[inner.kind, site.axis] += round(inner.nbytes(site)) * inner.times(site) * times
    return found


def ran_bytes(seen: Iterable[Counted]) -> Counter[Key]:
    """The same for what really ran, as one rank counted it."""
    found: Counter[Key] = Counter()
    for item in seen:
        if item.kind in MOVING:
            found[item.kind, item.axis] += item.bytes
    return found

