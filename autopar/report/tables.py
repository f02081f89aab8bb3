"""A plan for a person: what was chosen, what it costs, what else was tried, and how weights and values lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cluster import Cluster
from autopar.plan import Alternative, NodePlan, Plan
from autopar.problem.graph import Program
from autopar.report.grid import grid
from autopar.report.reshards import ROLES, Row, reshards
from autopar.report.weights import Weight, titles, weights
from autopar.search import SEARCHES
from autopar.text import gibibytes, seconds, times

RESHARDS_SHOWN = 12  # per block; the rest is in the emitted file


def report(plan: Plan, program: Program) -> Group:
    """The whole plan: the overview, then weights and reshards of each distinct block."""
    held, moved = weights(program, plan), reshards(program, plan)
    parts: list[RenderableType] = [overview(plan)]
    for scope, title in titles(program).items():
        here = [w for w in held if w.scope == scope]
        if here:
            parts += ["", _weights(here, plan, title)]
        there = [row for row in moved if row.scope == scope and row.step_s > 0]
        if there:
            parts += ["", _reshards(there, title)]
    return Group(*parts)


def overview(plan: Plan) -> Group:
    """What the plan alone says: the choice, its price, its stages, and the recipes that were priced."""
    stages = ("", _stages(plan)) if len(plan.stages) > 1 else ()
    parts = ("", _places(plan)) if plan.places > 1 and plan.cluster.get("parts") else ()
    return Group(_summary(plan), *stages, *parts, *(part for table in _alternatives(plan) for part in ("", table)))


def _places(plan: Plan) -> Table:
    """Where the places of a pipeline are, on a cluster of several parts."""
    table, at = (
        grid("places", "place", "ranks", "on", "device", "blocks", "memory", "of"),
        Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh),
    )
    each = plan.ranks // plan.places
    for place, nbytes in enumerate(plan.predicted.places_bytes):
        blocks = sum(
            stop - first for stage in plan.stages if stage.place == place for first, stop in stage.blocks.values()
        )
        table.add_row(
            str(place),
            f"{place * each}-{(place + 1) * each - 1}",
            at.part(place).label,
            at.device(place).name,
            str(blocks),
            gibibytes(nbytes),
            gibibytes(at.device(place).usable_memory_bytes),
        )
    return table


def _stages(plan: Plan) -> Table:
    table = grid("pipeline stages", "stage", "place", "blocks", "operators beside them", "from", "to")
    for number, stage in enumerate(plan.stages):
        ends = (stage.nodes[0], stage.nodes[-1]) if stage.nodes else ("", "")
        table.add_row(str(number), str(stage.place), stage.spans, str(len(stage.nodes)), *ends)
    return table


def _summary(plan: Plan) -> Table:
    table = grid(f"{plan.model} on {Cluster.from_dict(dict(plan.cluster)).label}, {plan.mode}", show_header=False)
    for key, value in _facts(plan).items():
        table.add_row(key, Text(value))
    for note in plan.notes:
        table.add_row("note", Text(note))
    return table


def _facts(plan: Plan) -> dict[str, str]:
    predicted = plan.predicted
    mesh = " x ".join(f"{name} {size}" for name, size in zip(plan.axes, plan.mesh, strict=True)) or "one device"
    gap = (
        f"{100 * predicted.gap:.2f} % (no plan is below {seconds(predicted.bound_s)})"
        if predicted.bound_s > 0
        else "none proven"
    )
    cluster = Cluster.from_dict(dict(plan.cluster))
    there = (
        gibibytes(cluster.device.usable_memory_bytes)
        if plan.places == 1 or not cluster.parts
        else "what each place has"
    )
    return {
        "strategy": f"{plan.strategy} (found by this search; no named recipe)"
        if plan.strategy in SEARCHES
        else plan.strategy,
        "mesh": mesh if plan.places == 1 else f"{plan.places} places x ({mesh})",
        **(
            {"pipeline": f"{len(plan.stages)} stages, {plan.schedule}, {plan.microbatches} microbatches"}
            if plan.pipelined
            else {}
        ),
        "planned for": ", ".join(f"{k} = {v}" for k, v in plan.hints.items()) or "fixed sizes",
        "precision": f"{plan.precision}, {plan.optimizer}" if plan.mode == "train" else plan.precision,
        "step": seconds(predicted.step_s),
        **_shares(plan),
        "memory": f"{gibibytes(predicted.memory_bytes)} of {there} per device",
        **({"run again": plan.run_again} if plan.run_again else {}),
        **(
            {
                "in parts": "; ".join(
                    f"{scope} from {', '.join(map(_beginning, parts.values()))} on, as {', '.join(parts)}"
                    for scope, parts in plan.parted.items()
                )
            }
            if plan.parted
            else {}
        ),
        "gap": gap,
        "splits": _splits(plan),
    }


def _beginning(at: int | str) -> str:
    """Where a part of a run begins: its first block, or the operator of the block before it behind which it does."""
    return str(at) if isinstance(at, int) else f"behind {at}"


def _shares(plan: Plan) -> dict[str, str]:
    """What the seconds of the step go to. Prices of a pipeline do not part communication from compute."""
    predicted = plan.predicted
    if plan.pipelined:
        return {
            "  microbatches": f"{seconds(predicted.compute_s)} on the busiest place, with communication in them",
            "  beside them": f"{seconds(predicted.exposed_s)} waiting for other places, sums of gradients, optimizer",
        }
    return {
        "  compute": seconds(predicted.compute_s),
        "  communication": f"{seconds(predicted.exposed_s)} exposed, "
        f"{seconds(predicted.hidden_s)} hidden under compute",
    }


def kinds(nodes: Mapping[str, NodePlan], axis: int | None = None) -> dict[str, int]:
    """How many operators are split in each way, on one mesh axis or on all together; parameters and inputs do not
    count."""
    counts: dict[str, int] = {}
    for node in nodes.values():
        if node.ins and node.outs:
            for kind in node.kinds if axis is None else node.kinds[axis : axis + 1]:
                counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


def _splits(plan: Plan) -> str:
    """What most operators do on each axis first: `a0: 41 sample, 16 replicate`."""
    each = [
        (name, sorted(kinds(plan.nodes, axis).items(), key=lambda item: -item[1]))
        for axis, name in enumerate(plan.axes)
    ]
    return "; ".join(f"{name}: {', '.join(f'{count} {kind}' for kind, count in found)}" for name, found in each)


SEARCHED = {"search": "pipelines (search)", "naive": "pipelines of one microbatch (search)"}
"""The strategies of plans that are no recipe and have several stages or microbatches, as people read them."""


def _alternatives(plan: Plan) -> list[Table]:
    """What was priced beside the chosen plan, the fastest first; and what has no price, by the reason why."""
    priced = grid("priced beside it", "recipe or search", "mesh", "step", "x chosen", "memory", "")
    without, best = grid("without a price", "why", "recipe or search"), plan.predicted.step_s
    reasons: dict[str, dict[str, None]] = {}
    for other in sorted(plan.alternatives, key=lambda a: (a.step_s is None, a.step_s or 0.0, a.name)):
        if other.step_s is None:
            reasons.setdefault(other.why or "does not fit", {})[_called(other)] = None
            continue
        ratio = "-" if best <= 0 else f"{other.step_s / best:.2f}"
        note = "; ".join(filter(None, ("chosen" * _is(other, plan), other.how)))
        priced.add_row(
            _called(other), times(other.mesh), seconds(other.step_s), ratio, gibibytes(other.memory_bytes), note
        )
    for why, names in reasons.items():
        without.add_row(why, ", ".join(names))
    return [table for table in (priced, without) if table.row_count]


def _called(other: Alternative) -> str:
    """Its name, for people: the spaces of the search for pipelines have short ones."""
    return SEARCHED.get(other.name, other.name)


def _is(other: Alternative, plan: Plan) -> bool:
    return (other.name, other.mesh, other.step_s) == (plan.strategy, plan.grid, plan.predicted.step_s)


def _weights(rows: Sequence[Weight], plan: Plan, title: str) -> Table:
    table = grid(f"weights {title}", "weight", "shape", "at rest", *(f"on {axis}" for axis in plan.axes), "per device")
    for row in rows:
        table.add_row(row.name, times(row.shape), row.layout, *row.uses, gibibytes(row.local_bytes))
    return table


def _reshards(rows: Sequence[Row], title: str) -> Table:
    table = grid(
        f"communication {title}", "tensor", "for", "collectives, bytes and price of one run", "runs", "per step"
    )
    ordered = sorted(rows, key=lambda row: (-row.step_s, row.tensor))
    for row in ordered[:RESHARDS_SHOWN]:
        readers = ROLES[row.role] or ", ".join(row.readers[:2]) + (", ..." if len(row.readers) > 2 else "")
        table.add_row(row.tensor, readers, row.reason, str(row.count), seconds(row.step_s))
    rest = ordered[RESHARDS_SHOWN:]
    if rest:
        table.add_row(f"{len(rest)} more", "", "", "", seconds(sum(row.step_s for row in rest)))
    return table
