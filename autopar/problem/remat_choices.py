"""What can be kept of blocks that are run again, under a solution, in its seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.problem.build import Model
from autopar.problem.graph import Op
from autopar.problem.nets import output_layout
from autopar.problem.remat_frontier import Choices
from autopar.problem.rerun import saves_results
from autopar.problem.step_shares import ForwardPrices


def choices(model: Model, forward: ForwardPrices, choice: Sequence[int], scope: str) -> Choices:
    """What can be kept of the blocks `scope`, with the seconds and bytes per step and device that the solution `choice`
    gives them: of operators, and of the changes of layout in front of them."""
    program, decisions = model.links[0].program, model.decode(choice)
    ops = [op for op in program.ops.values() if op.scope == scope]
    seconds = {op.name: forward.op_s(op, decisions[op.name]) for op in ops}
    for link in model.links:
        if link.moves and link.kind == "edge" and link.readers[0][0].scope == scope:
            row, first = link.rows[link.row[choice[link.producer]]], dict[int, str]()
            for (op, _), use in zip(link.readers, link.uses, strict=True):
                first.setdefault(
                    int(use.column[choice[use.node]]), op.name
                )  # readers share it; the first one brings it
            for column, name in first.items():
                once_s = float(forward.moves_s([row], [link.columns[column]], link.size_bytes)[0, 0])
                seconds[name] += once_s * link.count
    place = {op.name: (c, m) for c, cluster in enumerate(model.clusters) for m, op in enumerate(cluster.members)}

    def nbytes(op: Op) -> float:
        cluster, member = place[op.name]
        combo = model.choices[cluster][choice[cluster]]
        own = (
            sum(
                model.prices.local_bytes(program.bytes_of((op.name, i)), output_layout(combo, member, i))
                for i in range(len(op.call.outs))
            )
            * op.count
        )
        return own + (model.prices.extra_bytes(op, decisions[op.name]) if saves_results(op) else 0.0)

    return Choices(program, scope, seconds, {op.name: nbytes(op) if op.role == "op" else 0.0 for op in ops})
