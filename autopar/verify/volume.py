"""The bytes of collectives that ran, by kind and axis, against those that were priced. Kinds with an uneven cut are not
compared, since prices assume even cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from autopar.codegen.edges import Edges, out_pair
from autopar.codegen.tally import Tally
from autopar.cost.comm import group_bytes
from autopar.layout import even, fraction, is_placed
from autopar.plan import Plan
from autopar.problem.graph import Program, Ref
from autopar.rules.algorithms import ALGORITHMS
from autopar.runtime.count import Counted
from autopar.runtime.places import PIPELINE_AXIS
from autopar.verify.collectives import MOVING, Key, inside, moving

Uneven = dict[Key, str]
"""Kinds of collectives on an axis that move something in unequal parts -> the first such value."""


def priced_bytes(program: Program, plan: Plan, edges: Edges, place: int) -> tuple[Counter[Key], Uneven]:
    """Bytes of all collectives of each kind on each axis on the ranks of a place, as the cost model counts them, at the
    sizes of `program`; transfers between places, as one rank sends them, on PIPELINE_AXIS. And those that cannot be
    compared with what runs."""
    found, uneven = Counter[Key](), Uneven()
    tally = Tally(program, plan, place)
    for moved in tally.reshards(edges.reshards):
        sizes, full = tally.sizes_of(moved.reshard.ref, moved.parts), tally.bytes_of(moved.reshard.ref, moved.parts)
        for count, each in (
            (moved.runs - moved.first, moving(moved.reshard, plan.mesh)),
            (moved.first, moving(moved.reshard.in_first, plan.mesh)),
        ):
            for step in each if count else ():
                found[step.kind, step.axis] += round(group_bytes(step, full, plan.mesh)) * count
                if not all(even(sizes, layout, plan.mesh) for layout in (step.before, step.after)):
                    uneven.setdefault((step.kind, step.axis), _said(program, moved.reshard.ref))
    for name, node in plan.nodes.items():
        op = program.ops[name]
        for times, again, first, parts in tally.operators(name, again=edges.runs_again(op)) if any(node.runs) else ():
            for whole, inner in inside(op, node, plan.mesh, again=again, first=first) if times else ():
                operands = [
                    replace(tensor, hint=tally.sizes_of(ref, parts))
                    for tensor, ref in zip(whole.operands, op.operands, strict=True)
                ]
                site = replace(whole, operands=operands)
                found[inner.kind, site.axis] += round(inner.nbytes(site)) * inner.times(site) * times
                if not all(map(site.even, ALGORITHMS[node.runs[site.axis]].travels)):
                    uneven.setdefault((inner.kind, site.axis), _said(program, (name, 0)))
    if plan.pipelined:
        _between_places(tally, found, uneven)
    return found, uneven


def _between_places(tally: Tally, found: Counter[Key], uneven: Uneven) -> None:
    """Add to `found` the bytes that one rank of the place sends to other places, and those of gradients summed with
    them; to `uneven` the kinds with an uneven cut."""
    plan = tally.plan
    sent = [("send", ref, out_pair(plan, ref).value, plan.microbatches, plan.microbatches) for ref in tally.sends()]
    summed = [("all_reduce", (name, 0), out_pair(plan, (name, 0)).rest, 1, 1) for name in tally.shared()]
    for kind, ref, layout, parts, times in (*sent, *summed):
        if any(map(is_placed, layout)) or not even(tally.sizes_of(ref, parts), layout, plan.mesh):
            uneven.setdefault((kind, PIPELINE_AXIS), _said(tally.program, ref))
        found[kind, PIPELINE_AXIS] += round(tally.bytes_of(ref, parts) * fraction(layout, plan.mesh)) * times


def _said(program: Program, ref: Ref) -> str:
    """The name and sizes of a value, for a note."""
    op = program.ops[ref[0]]
    return f"{op.fqn or op.name} of sizes {tuple(op.call.outs[ref[1]].sizes)}"


def comparable(of: Counter[Key], uneven: Uneven) -> Counter[Key]:
    """`of` without the kinds that are not compared."""
    return Counter({key: count for key, count in of.items() if key not in uneven})


def not_compared(uneven: Uneven, plan: Plan) -> str:
    """The note on kinds whose bytes are not compared."""
    kinds = ", ".join(
        f"{kind} {'between places' if axis == PIPELINE_AXIS else f'on {plan.axes[axis]}'}" for kind, axis in uneven
    )
    return (
        f"bytes of {kinds} are not compared with their prices, which take cuts as even: {next(iter(uneven.values()))} "
        "is not cut evenly. Numbers of collectives are compared"
    )


def ran_bytes(seen: Iterable[Counted]) -> Counter[Key]:
    """The bytes that ran by kind and axis, as one rank counted them."""
    found: Counter[Key] = Counter()
    for item in seen:
        if item.kind in MOVING:
            found[item.kind, item.axis] += item.bytes
    return found
