"""A lower bound of the memory that a plan needs: that of the model, divided evenly over all devices. Called by the
planner and autopar.joint."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.problem.build import build
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.clusters import Joint
from autopar.problem.graph import Program
from autopar.problem.prices import Prices
from autopar.problem.remat import Levels, rematerialised
from autopar.problem.settings import Settings
from autopar.problem.step_shares import ForwardPrices


def least_bytes(
    program: Program,
    clusters: list[OpCluster],
    joints: Sequence[Sequence[Joint]],
    cluster: Cluster,
    settings: Settings,
    remat: Levels,
) -> float:
    """Bytes of each device if everything that a step of one microbatch holds were cut evenly over all of `cluster`,
    with the blocks of `remat` run again. `joints` are the options of each of `clusters` on an axis of one rank."""
    one = cluster.line(1).mesh((1,))
    made = build(program, clusters, [joints], Prices(one, cluster.device, settings), math.inf)
    model = rematerialised(made, ForwardPrices(one, cluster.device, settings), remat)
    choice = tuple(int(node.memory_bytes.argmin()) for node in model.problem.nodes)
    return model.problem.price(choice).memory_bytes / cluster.devices
