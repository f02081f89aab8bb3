"""Why a node lies as it does: the price of the whole step for each alternative choice of that node.

All other nodes keep their choice, so a difference is what this one decision is worth. Where an alternative would only pay
together with others the table says so by a large price: the reshards around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.problem.build import Model


@dataclass(frozen=True, slots=True)
class Row:
    """One alternative: its label per axis, step seconds and bytes per device with it, and whether it is the chosen one."""

    label: str
    step_s: float
    memory_bytes: float
    chosen: bool


def explain(model: Model, choice: tuple[int, ...], node: str) -> list[Row]:
    """All alternatives of the cluster that holds `node`, cheapest first. Raises PlanError when there is no such node."""
    for index, cluster in enumerate(model.clusters):
        if any(op.name == node or op.name.rsplit("/", 1)[-1] == node or op.fqn == node for op in cluster.members):
            break
    else:
        known = ", ".join(cluster.name for cluster in model.clusters[:20])
        raise PlanError(f"the plan has no node {node!r}; nodes are {known}, ...")
    rows = []
    for option, label in enumerate(model.problem.nodes[index].labels):
        cost = model.problem.price((*choice[:index], option, *choice[index + 1:]))
        rows.append(Row(label, cost.time_s, cost.memory_bytes, option == choice[index]))
    return sorted(rows, key=lambda row: (row.step_s, not row.chosen, row.label))
