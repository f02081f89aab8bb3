"""Independent branches (problem.branches) in a Problem: the lane in which each placed choice works, and the pairs of
choices that would place one branch in two ways. Called by problem.build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.problem.branches import Branches, coordinate_of
from autopar.problem.cluster_members import Choice
from autopar.problem.clusters import Cluster
from autopar.problem.types import Net, Node


def in_lanes(
    nodes: Sequence[Node], clusters: Sequence[Cluster], choices: Sequence[Sequence[Choice]], branches: Branches
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """Nodes with the lane of every placed choice, and the stretch of each lane.

    The branches of a region are one stretch on each axis, and the optimizer's pass over their weights is another.
    Placed work hides no collectives: those are for all ranks.
    """
    lanes: dict[tuple[int, int, bool, int], int] = {}  # region, axis, whether it is the optimizer's pass, coordinate
    found = []
    for node, cluster, options in zip(nodes, clusters, choices, strict=True):
        branch = branches.of.get(cluster.root.name)
        lane = np.full(len(options), -1)
        for i, combo in enumerate(options):
            for axis, joint in enumerate(combo):
                coordinate = coordinate_of(joint.options[-1])
                if branch is not None and coordinate is not None:
                    key = (branch.region, axis, cluster.members[0].role == "param", coordinate)
                    lane[i] = lanes.setdefault(key, len(lanes))
        placed = lane >= 0
        found.append(replace(node, lane=lane, hide_s=np.where(placed, 0.0, node.hide_s)) if placed.any() else node)
    stretches = list(dict.fromkeys(key[:3] for key in lanes))
    return tuple(found), tuple(stretches.index(key[:3]) for key in lanes)


def whole(net: Net, clusters: Sequence[Cluster], choices: Sequence[Sequence[Choice]], branches: Branches) -> Net:
    """`net` with those pairs forbidden in which two clusters of one branch are placed on different coordinates."""
    producer = clusters[net.producer]
    branch = branches.of.get(producer.root.name)
    if branch is None or producer.members[0].role == "param":
        return net
    forbidden = np.zeros(net.cost_s.shape, bool)
    at_row = dict(zip(net.row.tolist(), map(_coordinates, choices[net.producer]), strict=True))
    for use in net.uses:
        if branches.of.get(clusters[use.node].root.name) == branch:
            at_column = dict(zip(use.column.tolist(), map(_coordinates, choices[use.node]), strict=True))
            forbidden |= [
                [at_row.get(r) != at_column.get(c, at_row.get(r)) for c in range(net.cost_s.shape[1])]
                for r in range(net.cost_s.shape[0])
            ]
    return replace(net, cost_s=np.where(forbidden, np.inf, net.cost_s))


def _coordinates(combo: Choice) -> tuple[int | None, ...]:
    """For each axis the coordinate on which a choice is placed; None where all ranks work."""
    return tuple(coordinate_of(joint.options[-1]) for joint in combo)
