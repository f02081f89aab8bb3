"""Why a plan is as it is: the price of the whole step for each alternative choice of one node, and what costs most.

All other nodes keep their choice, so a difference is what this one decision is worth. Where an alternative would only
pay together with others the table says so by a large price: the reshards around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.decisions import node_plan
from autopar.errors import PlanError
from autopar.layout import NO_GRAD, show
from autopar.plan import NodePlan, Plan
from autopar.problem.build import Model
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op
from autopar.problem.pairs import LayoutPair
from autopar.rules.language import Option


@dataclass(frozen=True, slots=True)
class Row:
    """One alternative: how its result lies and its weights rest, the splits per axis, seconds per step and bytes per
    device with it (infinite seconds: not possible beside the other choices), and whether it is the chosen one."""

    label: str
    result: str
    step_s: float
    memory_bytes: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One node's share of the step: its own seconds (compute and the collectives inside it), its choice, and how much
    the step would grow with the second best choice (infinity: there is no other)."""

    node: str
    where: str
    label: str
    own_s: float
    next_label: str
    next_s: float


def choice_of(model: Model, plan: Plan) -> tuple[int, ...]:
    """The solution of `model` that `plan` holds. Raises PlanError when it has none for a node: rules or prices
    differ."""
    return tuple(
        _chosen(cluster, options, plan) for cluster, options in zip(model.clusters, model.choices, strict=True)
    )


def _chosen(cluster: Cluster, options: Sequence[Any], plan: Plan) -> int:
    for index, combo in enumerate(options):
        members = ((op, tuple(joint.options[m] for joint in combo)) for m, op in enumerate(cluster.members))
        if all(_is(plan.nodes.get(op.name), op, per_axis) for op, per_axis in members):
            return index
    raise PlanError(
        f"the plan's layout of {cluster.name} ({cluster.root.where}) is not among its options now: it was planned with "
        "other rules; plan the model again"
    )


def _is(node: NodePlan | None, op: Op, options: tuple[Option, ...]) -> bool:
    """Whether a plan says of `op` what it would say if these options, one per mesh axis, were chosen."""
    if node is None or node.factors != tuple(o.factor for o in options):  # tells most options apart, and quickly
        return False
    said = node_plan(op, options)
    return (node.ins, node.outs, node.runs) == (said.ins, said.outs, said.runs)


def find(model: Model, node: str) -> int:
    """The index of the cluster that holds `node`: a node's name, with or without its block, or a parameter's name,
    whole or in its block.

    Raises PlanError when there is none, and for a name that several have in blocks of their own.
    """
    held = [(index, op) for index, cluster in enumerate(model.clusters) for op in cluster.members]
    for index, op in held:
        if node in (op.name, *op.node.meta.get("fqns", ()), *([op.fqn or op.name] if "/" not in op.name else ())):
            return index
    inside = {op.name: index for index, op in held if node in (op.name.rsplit("/", 1)[-1], op.fqn or op.name)}
    if len(set(inside.values())) > 1:
        raise PlanError(f"several nodes are called {node!r} in their blocks: name one of {', '.join(inside)}")
    if inside:
        return next(iter(inside.values()))
    names = [name for cluster in model.clusters for op in cluster.members for name in (op.fqn or op.name,)]
    near = [name for name in names if node.rsplit(".", 1)[-1] in name] or names
    raise PlanError(
        f"the plan has no node {node!r}; nodes are {', '.join(near[:20])}{', ...' if len(near) > 20 else ''}"
    )


def explain(model: Model, choice: tuple[int, ...], node: str) -> list[Row]:
    """All alternatives of the cluster that holds `node`, cheapest first. Raises PlanError when there is no such
    node."""
    return alternatives(model, choice, find(model, node))


def alternatives(model: Model, choice: tuple[int, ...], index: int) -> list[Row]:
    """All alternatives of cluster `index`, cheapest first, the chosen one before its equals."""
    rows = []
    for option, label in enumerate(model.problem.nodes[index].labels):
        cost = model.problem.price((*choice[:index], option, *choice[index + 1 :]))
        rows.append(
            Row(label, _result(model.choices[index][option]), cost.time_s, cost.memory_bytes, option == choice[index])
        )
    return sorted(rows, key=lambda row: (row.step_s, not row.chosen, row.label, row.result))


def _result(combo: Sequence[Any]) -> str:
    """How the root's first tensor lies: its result, or what a node without one takes."""
    uses = [(joint.options[-1].outs or joint.options[-1].ins)[0] for joint in combo]
    lies = LayoutPair.of_uses(tuple(uses))
    return show(lies.value) if NO_GRAD in lies.grad else f"{show(lies.value)}, gradient {show(lies.grad)}"


def parts(model: Model, choice: tuple[int, ...], count: int = 10) -> list[Part]:
    """The nodes with the largest share of the step, the largest first."""
    nodes = model.problem.nodes
    order = sorted(range(len(nodes)), key=lambda v: (-float(nodes[v].cost_s[choice[v]]), v))[:count]
    return [_part(model, choice, index) for index in order]


def _part(model: Model, choice: tuple[int, ...], index: int) -> Part:
    node, root = model.problem.nodes[index], model.clusters[index].root
    rows = alternatives(model, choice, index)
    mine = next(row for row in rows if row.chosen)
    other = next((row for row in rows if not row.chosen), None)
    return Part(
        node.name,
        root.where,
        mine.label,
        float(node.cost_s[choice[index]]),
        other.label if other else "",
        other.step_s - mine.step_s if other else float("inf"),
    )
