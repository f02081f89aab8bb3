"""Which option each operator takes on the axis of microbatches: split by samples, with as few changes of layout as there can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.pipeline.microbatches import Microbatching, microbatching
from autopar.problem.build import build
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.clusters import Table, join
from autopar.problem.graph import Program
from autopar.problem.pairs import Pair
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.search import ilp

CHANGE_S = 1e6
"""Price of any change of layout: microbatches cannot change one."""
LIMIT_S = 5.0


class _Matching(Prices):
    """Prices under which all that matters is whether values are wanted as they are made."""

    def table_s(self, rows: Sequence[Pair], columns: Sequence[Pair], size_bytes: float, again: Sequence[bool] = (), *,
                weight: bool = False, grad_bytes: float | None = None) -> np.ndarray:
        """CHANGE_S for every change of a value's layout; gradients add up whatever they are."""
        return np.array([[0.0 if row[0] == column[0] else CHANGE_S for column in columns] for row in rows])


def sharing(program: Program, clusters: list[OpCluster], table: Table, count: int, cluster: Cluster, settings: Settings) -> Microbatching:
    """How `count` microbatches share the values of `program`; `table` has the options of an axis of `count` ranks.

    Raises PlanError, naming the operator, where microbatches would not compute what the batch computes, InfeasibleError where
    the batch cannot be cut by `count`.
    """
    joints = [join(cluster, table, roles.data(count)) for cluster in clusters]
    model = build(program, clusters, [joints], _Matching(cluster.line(count).mesh((count,)), cluster.device, settings), float("inf"),
                  "microbatches")
    decisions = model.decode(ilp.search(model.problem, time_limit_s=LIMIT_S).choice)
    return microbatching(program, {name: options[0] for name, options in decisions.items()}, count)
