"""Which option each operator takes on the axis of microbatches: split by samples, with as few changes of layout as
there can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.layout import NO_GRAD, shard
from autopar.pipeline.microbatches import Microbatching, from_inputs, microbatching
from autopar.problem.build import build
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.clusters import Joint, Table, join
from autopar.problem.graph import Op, Program
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.rules.language import Option, Use
from autopar.search import ilp

CHANGE_S = 1e6
"""Price of any change of layout: microbatches cannot change one."""
TOTAL_S = 1e3
"""Price of the sum of parts without a gradient: where it depends on inputs alone, it is a total."""
SHARE_S = 1.0
"""Price of what is the same for all where a part of a sum is wanted: each takes its part, where that saves a change."""
LIMIT_S = 5.0


class _Matching(Prices):
    """Prices under which all that matters is whether values are wanted as they are made."""

    def table_s(
        self,
        rows: Sequence[LayoutPair],
        columns: Sequence[LayoutPair],
        size_bytes: float,
        again: Sequence[bool] = (),
        *,
        weight: bool = False,
        grad_bytes: float | None = None,
    ) -> np.ndarray:
        """What every change of a value's layout takes; gradients add up whatever they are."""
        return np.array([[self._change_s(row, column) for column in columns] for row in rows])

    def _change_s(self, made: LayoutPair, wanted: LayoutPair) -> float:
        if made.value == wanted.value:
            return 0.0
        if (made.value, wanted.value) == (("R",), ("P",)):
            return SHARE_S
        return TOTAL_S if (made.value, wanted.value) == (("P",), ("R",)) and NO_GRAD in made.grad else CHANGE_S


def _results(op: Op) -> list[Joint]:
    """What is read of results: of a loss parts of a sum, of what else the model returns whatever there is. None for
    other operators."""
    if op.role not in ("loss", "output"):
        return []
    entries = ("P",) if op.role == "loss" else ("R", "P", *(shard(dim) for dim in range(len(op.call.ins[0].shape))))
    return [Joint((Option(entry, (Use(entry, "R" if op.call.ins[0].grad else NO_GRAD),), ()),)) for entry in entries]


def _apart(program: Program, clusters: list[OpCluster]) -> list[OpCluster]:
    """`clusters`, those with operators of inputs alone one by one: what these sum up may be a total, which others then
    take whole."""
    cone = from_inputs(program)
    home = {
        op.name: OpCluster(op.name, [op], anchor=True)
        if len(cluster.members) > 1 and any(m.role == "op" and m.name in cone for m in cluster.members)
        else cluster
        for cluster in clusters
        for op in cluster.members
    }
    return list({home[name].name: home[name] for name in program.ops}.values())


def sharing(
    program: Program, clusters: list[OpCluster], table: Table, count: int, cluster: Cluster, settings: Settings
) -> Microbatching:
    """How `count` microbatches share the values of `program`; `table` has the options of an axis of `count` ranks.

    Raises PlanError, naming the operator, where microbatches would not compute what the batch computes, InfeasibleError
    where the batch cannot be cut by `count`.
    """
    clusters = _apart(program, clusters)
    joints = [_results(cluster.root) or join(cluster, table, roles.data(count)) for cluster in clusters]
    model = build(
        program,
        clusters,
        [joints],
        _Matching(cluster.line(count).mesh((count,)), cluster.device, settings),
        float("inf"),
        "microbatches",
    )
    decisions = model.decode(ilp.search(model.problem, time_limit_s=LIMIT_S).choice)
    return microbatching(program, {name: options[0] for name, options in decisions.items()}, count)
