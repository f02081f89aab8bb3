"""A plan for a person: what was chosen, what it costs, what else was tried, and how parameters and blocks lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group
from rich.table import Table

from autopar.plan import NodePlan, Plan


def seconds(value: float | None) -> str:
    """`0.0123` -> `12.3 ms`."""
    if value is None:
        return "-"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e9:.0f} ns"


def gibibytes(value: float | None) -> str:
    """Bytes -> `61.2 GiB`, `12.3 MiB`."""
    if value is None:
        return "-"
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"


def overview(plan: Plan) -> Group:
    """The whole plan as rich tables."""
    return Group(_summary(plan), _alternatives(plan), _layouts(plan))


def _summary(plan: Plan) -> Table:
    table = Table(title=f"{plan.model} on {plan.cluster.get('name', 'cluster')}", show_header=False, title_justify="left")
    predicted = plan.predicted
    mesh = " x ".join(f"{n}={s}" for n, s in zip(plan.axes, plan.mesh, strict=True)) or "one device"
    gap = f"{100 * predicted.gap:.2f} %" if predicted.bound_s > 0 else "none proven"
    rows = {
        "strategy": plan.strategy, "mesh": mesh, "planned for": ", ".join(f"{k}={v}" for k, v in plan.hints.items()),
        "step": f"{seconds(predicted.step_s)}  (compute {seconds(predicted.compute_s)}, exposed communication "
                f"{seconds(predicted.exposed_s)}, hidden {seconds(predicted.hidden_s)})",
        "memory per device": gibibytes(predicted.memory_bytes), "gap to the proven bound": gap,
        "splits": ", ".join(f"{kind} {count}" for kind, count in _kinds(plan.nodes).items()),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    for note in plan.notes:
        table.add_row("note", note)
    return table


def _kinds(nodes: Mapping[str, NodePlan]) -> dict[str, int]:
    """How many (operator, axis) pairs are split in each way; parameters and inputs do not count."""
    counts: dict[str, int] = {}
    for node in nodes.values():
        if node.ins and node.outs:
            for kind in node.kinds:
                counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


def _alternatives(plan: Plan) -> Table:
    table = Table("recipe", "mesh", "step", "memory", "", title="recipes priced", title_justify="left")
    order = sorted(plan.alternatives, key=lambda a: (a.step_s is None, a.step_s or 0.0, a.name))
    for other in order:
        why = "does not fit" if other.step_s is None else ""
        table.add_row(other.name, "x".join(map(str, other.mesh)), seconds(other.step_s), gibibytes(other.memory_bytes), why)
    return table


def _layouts(plan: Plan) -> Table:
    """Operators that are split by a weight or hold one, with the layout of their result, and parameters at rest."""
    table = Table("node", *plan.axes, "result lies as", title="layouts", title_justify="left")
    for name, node in _interesting(plan.nodes.items()):
        value = node.outs[0].split("|")[0] if node.outs else ""
        table.add_row(name, *(f"{f or '-'} ({k})" if k != "replicate" else "-" for f, k in zip(node.factors, node.kinds, strict=True)), value)
    return table


def _interesting(nodes: Iterable[tuple[str, NodePlan]]) -> list[tuple[str, NodePlan]]:
    """Nodes that take part in a decision: no views of what was decided before them."""
    shown = []
    for name, node in nodes:
        lies_still = not node.ins and node.outs
        if lies_still or any(a != b for a in node.ins for b in node.outs[:1]):
            shown.append((name, node))
    return shown
