"""The number of collectives that ran, by kind and mesh axis, against the number that was priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autopar.codegen.edges import Edges, Reshard, options
from autopar.codegen.tally import Tally
from autopar.layout import Step
from autopar.plan import NodePlan, Plan
from autopar.problem.graph import Op, Program
from autopar.problem.op_algorithms import sites
from autopar.rules.site import InnerCollective, Site
from autopar.runtime.count import Counted
from autopar.runtime.places import PIPELINE_AXIS

MOVING = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "send")
Key = tuple[str, int]  # (kind, mesh axis)


def priced(program: Program, plan: Plan, edges: Edges, place: int = 0) -> Counter[Key]:
    """How many collectives of each kind a step runs on each axis on the ranks of a place, by the plan. Gradients that
    are summed in buckets count one by one, as they are priced. Transfers between places are on PIPELINE_AXIS."""
    found: Counter[Key] = Counter()
    tally = Tally(program, plan, place)
    for reshard, runs, first, _ in tally.reshards(edges.reshards):
        for step in moving(reshard, plan.mesh):
            found[step.kind, step.axis] += runs - first
        for step in moving(reshard.in_first, plan.mesh):
            found[step.kind, step.axis] += first
    for name, node in plan.nodes.items():
        for times, again, first, _ in tally.operators(name, again=edges.runs_again(program.ops[name])):
            for site, inner in inside(program.ops[name], node, plan.mesh, again=again, first=first):
                found[inner.kind, site.axis] += inner.times(site) * times
    if plan.pipelined:
        found["send", PIPELINE_AXIS] += plan.microbatches * len(tally.sends())
        found["all_reduce", PIPELINE_AXIS] += len(tally.shared())
    return found


def inside(
    op: Op, node: NodePlan, sizes: tuple[int, ...], *, again: bool, first: bool
) -> list[tuple[Site, InnerCollective]]:
    """The collectives that runtime algorithms run inside `op`, as planned; those of the forward twice where it is run
    `again`. `first`: in the first block of a run, where some operands may have no gradients."""
    training = op.graded and not (first and op.late)
    return [
        (site, each)
        for algorithm, site in sites(op, options(node), sizes, first=first)
        for each in (*algorithm.inner(training=training), *(algorithm.forward if again else ()))
    ]


def moving(reshard: Reshard, sizes: tuple[int, ...]) -> list[Step]:
    """The collectives of one run of a reshard: forward, once more for the backward where it is gathered or run again,
    backward."""
    forward = [s for s in reshard.forward(sizes) if s.kind in MOVING]
    again = forward if reshard.regathers(sizes) or reshard.replay == "again" else []
    return [*forward, *again, *(s for s in reshard.backward(sizes) if s.kind in MOVING)]


def ran(seen: Iterable[Counted]) -> Counter[Key]:
    """The same counts for what really ran."""
    return Counter((item.kind, item.axis) for item in seen if item.kind in MOVING)


def differences(wanted: Counter[Key], got: Counter[Key]) -> int:
    """How many collectives are missing or too many."""
    return sum(abs(wanted[key] - got[key]) for key in {**wanted, **got})


def describe(wanted: Counter[Key], got: Counter[Key]) -> str:
    """The differences for a message: `all_gather on axis 0: 12 priced, 10 run`."""
    return "; ".join(
        f"{kind} on axis {axis}: {wanted[kind, axis]} priced, {got[kind, axis]} run"
        for kind, axis in {**wanted, **got}
        if wanted[kind, axis] != got[kind, axis]
    )
