"""Which option each operator takes on the axis of microbatches (pipeline.microbatches): samples are split, with as few
changes of layout as possible. A small Problem, solved by `ilp`. Called by autopar.joint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.layout import NO_GRAD, shard
from autopar.pipeline.microbatches import Microbatching, from_inputs, microbatching
from autopar.problem.build import build
from autopar.problem.clusters import Allow, Joint, Table, join
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.graph import Op, Program
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.rules.language import Option, Use
from autopar.search import ilp

CHANGE_S = 1e6
"""Price of a change of layout, which microbatches cannot do; seconds only by name, as all prices here."""
TOTAL_S = 1e3
"""Price of the sum of a partial value without a gradient: where it depends on inputs alone it is a total."""
SHARE_S = 1.0
"""Price of a value that is the same for all microbatches and is read as a partial sum: each takes 1 / n of it."""
LIMIT_S = 5.0
"""Time limit of the search."""


class _Matching(Prices):
    """Prices by which a reshard costs CHANGE_S, TOTAL_S, SHARE_S or nothing, whatever its size."""

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
        """[rows, columns]: the price of each change of a value's layout; gradients cost nothing, since they add up over
        microbatches."""
        return np.array([[self._change_s(row, column) for column in columns] for row in rows])

    def _change_s(self, made: LayoutPair, wanted: LayoutPair) -> float:
        """The price of a value that is `made` in one layout and `wanted` in another."""
        if made.value == wanted.value:
            return 0.0
        if (made.value, wanted.value) == (("R",), ("P",)):
            return SHARE_S
        return TOTAL_S if (made.value, wanted.value) == (("P",), ("R",)) and NO_GRAD in made.grad else CHANGE_S


def _results(op: Op) -> list[Joint]:
    """The joint options of a result of the model: of the loss a partial sum, of another output any layout. Empty for
    other operators."""
    if op.role not in ("loss", "output"):
        return []
    entries = ("P",) if op.role == "loss" else ("R", "P", *(shard(dim) for dim in range(len(op.call.ins[0].shape))))
    return [Joint((Option(entry, (Use(entry, "R" if op.call.ins[0].grad else NO_GRAD),), ()),)) for entry in entries]


def _inputs_apart(program: Program, clusters: list[OpCluster]) -> list[OpCluster]:
    """`clusters`, in which every operator that depends on inputs alone is a cluster of its own: it may sum up a total,
    which the other operators of its cluster then read whole."""
    cone = from_inputs(program)
    home = {
        op.name: OpCluster(op.name, [op], anchor=True)
        if len(cluster.members) > 1 and any(m.role == "op" and m.name in cone for m in cluster.members)
        else cluster
        for cluster in clusters
        for op in cluster.members
    }
    return list({home[name].name: home[name] for name in program.ops}.values())


def _apart(count: int) -> Allow:
    """Which options `count` microbatches have: work splits over samples, and by operators alone, since a runtime
    algorithm exchanges what its parts need of each other (the rows of a ring's attention, where samples are not along
    the first dim of the inputs)."""
    data = roles.data(count)
    return lambda op, option: data(op, option) and not (op.role == "op" and option.run)


def sharing(
    program: Program, clusters: list[OpCluster], table: Table, count: int, cluster: Cluster, settings: Settings
) -> Microbatching:
    """How `count` microbatches share the values of `program`; `table` has the options of an axis of `count` ranks.

    Raises PlanError, naming the operator, where microbatches would not compute what the batch computes, InfeasibleError
    where the batch cannot be cut by `count`.
    """
    clusters = _inputs_apart(program, clusters)
    joints = [_results(cluster.root) or join(cluster, table, _apart(count)) for cluster in clusters]
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
