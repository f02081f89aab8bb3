"""Bytes that ran against bytes that were priced, where every cut is even (prices take uneven cuts as even)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from autopar.codegen.edges import Edges, out_pair
from autopar.codegen.tally import Tally
from autopar.cost.comm import group_bytes
from autopar.layout import even, fraction, is_placed
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.rules.algorithms import ALGORITHMS
from autopar.runtime.count import Counted
from autopar.runtime.places import PIPELINE_AXIS
from autopar.verify.collectives import MOVING, Key, inside, moving


def priced_bytes(program: Program, plan: Plan, edges: Edges, place: int = 0) -> Counter[Key] | None:
    """Bytes of all collectives of each kind on each axis on the ranks of a place, as the cost model counts them, at the sizes of `program`; transfers between
    places, as one rank sends them, on PIPELINE_AXIS. None where some tensor that is moved is cut unevenly."""
    found: Counter[Key] = Counter()
    tally = Tally(program, plan, place)
    for moved in tally.reshards(edges.reshards):
        sizes, full = tally.sizes_of(moved.reshard.ref, moved.parts), tally.bytes_of(moved.reshard.ref, moved.parts)
        steps = moving(moved.reshard, plan.mesh)
        if not all(even(sizes, layout, plan.mesh) for step in steps for layout in (step.before, step.after)):
            return None
        for count, each in ((moved.runs - moved.first, steps), (moved.first, moving(moved.reshard.in_first, plan.mesh))):
            for step in each:
                found[step.kind, step.axis] += round(group_bytes(step, full, plan.mesh)) * count
    for name, node in plan.nodes.items():
        op = program.ops[name]
        for times, again, first, parts in tally.operators(name, again=edges.runs_again(op)) if any(node.runs) else ():
            for whole, inner in inside(op, node, plan.mesh, again=again, first=first) if times else ():
                operands = [replace(tensor, hint=tally.sizes_of(ref, parts)) for tensor, ref in zip(whole.operands, op.operands, strict=True)]
                site = replace(whole, operands=operands)
                if not all(map(site.even, ALGORITHMS[node.runs[site.axis]].travels)):
                    return None
                found[inner.kind, site.axis] += round(inner.nbytes(site)) * inner.times(site) * times
    return _between_places(tally, found) if plan.pipelined else found


def _between_places(tally: Tally, found: Counter[Key]) -> Counter[Key] | None:
    """`found` with what one rank of the place sends to other places, and sums with them; None where that is cut unevenly."""
    plan = tally.plan
    sent = [("send", ref, out_pair(plan, ref).value, plan.microbatches, plan.microbatches) for ref in tally.sends()]
    summed = [("all_reduce", (name, 0), out_pair(plan, (name, 0)).rest, 1, 1) for name in tally.shared()]
    for kind, ref, layout, parts, times in (*sent, *summed):
        if any(map(is_placed, layout)) or not even(tally.sizes_of(ref, parts), layout, plan.mesh):
            return None
        found[kind, PIPELINE_AXIS] += round(tally.bytes_of(ref, parts) * fraction(layout, plan.mesh)) * times
    return found


def ran_bytes(seen: Iterable[Counted]) -> Counter[Key]:
    """The same for what really ran, as one rank counted it."""
    found: Counter[Key] = Counter()
    for item in seen:
        if item.kind in MOVING:
            found[item.kind, item.axis] += item.bytes
    return found

