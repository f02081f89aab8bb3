"""Every step that ran against every step that was priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autopar.codegen.edges import Edges, Reshard
from autopar.cost.comm import group_bytes
from autopar.layout import Step
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.rules.algorithms import ALGORITHMS
from autopar.runtime.count import Counted

MOVING = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
Key = tuple[str, int]  # (kind, mesh axis)


def priced(program: Program, plan: Plan, edges: Edges) -> Counter[Key]:
    """How many collectives of each kind a step runs on each axis, by the plan. Bucketed gradient sums are left out: how many
    buckets there are is the runtime's affair, their bytes are compared by `synced_bytes`."""
    found: Counter[Key] = Counter()
    for reshard in edges.reshards:
        if reshard.role != "sync":
            for step in _steps(reshard, plan.mesh):
                found[step.kind, step.axis] += reshard.count
    for name, node in plan.nodes.items():
        for axis, run in enumerate(node.runs):
            if run:
                op = program.ops[name]
                trained = any(t.grad for t in op.call.outs)
                for kind in ALGORITHMS[run].kinds(training=trained):
                    found[kind, axis] += op.count
    return found


def _steps(reshard: Reshard, sizes: tuple[int, ...]) -> list[Step]:
    forward = [s for s in reshard.forward(sizes) if s.kind in MOVING]
    again = reshard.weight and reshard.gradient and any(s.kind == "all_gather" for s in forward)
    return [*forward, *(forward if again else ()), *(s for s in reshard.backward(sizes) if s.kind in MOVING)]


def synced_bytes(program: Program, plan: Plan, edges: Edges) -> Counter[int]:
    """Bytes of gradients that are summed in buckets, by axis."""
    found: Counter[int] = Counter()
    for reshard in edges.reshards:
        if reshard.role == "sync":
            for step in reshard.backward(plan.mesh):
                found[step.axis] += round(group_bytes(step, program.bytes_of(reshard.ref), plan.mesh)) * reshard.count
    return found


def ran(seen: Iterable[Counted], bucket: str = "gradients") -> tuple[Counter[Key], Counter[int]]:
    """The same two counts for what really ran."""
    counts: Counter[Key] = Counter()
    synced: Counter[int] = Counter()
    for item in seen:
        if item.name.startswith(bucket):
            synced[item.axis] += item.bytes
        elif item.kind in MOVING:
            counts[item.kind, item.axis] += 1
    return counts, synced


def differences(wanted: Counter[Key], got: Counter[Key]) -> int:
    """How many collectives are missing or too many."""
    return sum(abs(wanted[key] - got[key]) for key in {**wanted, **got})
