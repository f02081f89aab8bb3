"""Places of several kinds (on different devices or links), and one Problem for all of them. Used by joint.shape_models
and joint.staging.

    grounds     for each order of the cluster's parts: the places, with the kind and the memory of each
    Weights     how much each kind of place counts in a Problem whose choices are the same on every place

Faster places get more of the model, so that all take the same time. If place p would take t_p for the whole model, its
share of the model is L / t_p, where L = 1 / (1/t_1 + 1/t_2 + ...) is the time of the balanced step. A choice that adds
d to t_p adds (L / t_p)^2 d to L. This factor is the weight of the place. It is computed with t_p at the best rates of
the device. If choices change the t_p in other proportions (as on slow links), the weighted sum is above the true L by a
second-order term: proportions that are off by a third give an error of 2 to 3 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.cluster import Cluster, Places, orders
from autopar.problem.build import Model
from autopar.problem.types import Net, Node


@dataclass(frozen=True, eq=False)
class Ground:
    """The places of a shape, with the cluster's parts in one order: for each place the number of its kind, and the
    bytes per device that a plan may fill there."""

    places: Places
    kinds: tuple[int, ...]
    limits: tuple[float, ...]


def distinct(cluster: Cluster) -> list[Cluster]:
    """The parts of a cluster that differ; the cluster itself where it has none."""
    return list(dict.fromkeys(cluster.parts)) or [cluster]


def grounds(
    cluster: Cluster, count: int, sizes: tuple[int, ...], limit: Callable[[Places, int], float]
) -> list[Ground]:
    """The Grounds for all orders of the cluster's parts in which the pipeline may run through them, with `count` places
    of mesh `sizes`; `limit` gives the bytes per device that a plan may fill on a place."""
    parts, found = distinct(cluster), []
    for ordered in orders(cluster) if count > 1 else [cluster]:
        at = Places(ordered, count, sizes)
        kinds = tuple(parts.index(at.part(place)) if at.mixed else 0 for place in range(count))
        found.append(Ground(at, kinds, tuple(limit(at, place) for place in range(count))))
    return found


@dataclass(frozen=True, eq=False)
class Weights:
    """For each kind of place: how many places there are (`counts`), and the share of the work that one of them does in
    a balanced step (`shares`)."""

    counts: tuple[int, ...]
    shares: tuple[float, ...]

    @staticmethod
    def of(counts: Sequence[int], paces: Sequence[float]) -> Weights:
        """From the number of places of each kind, and how often per second one of them could do the whole model
        (`paces`)."""
        whole = sum(n * pace for n, pace in zip(counts, paces, strict=True))
        return Weights(tuple(counts), tuple(pace / whole for pace in paces))

    @cached_property
    def places(self) -> int:
        """The number of places of all kinds."""
        return sum(self.counts)

    def meant(self, models: Sequence[Model]) -> Model:
        """The weighted mean of the Problems of all kinds, by which layouts are chosen: seconds of the whole model on a
        place of average speed."""
        factors = [self.places * n * share**2 for n, share in zip(self.counts, self.shares, strict=True)]

        def mean(tables: list[np.ndarray]) -> np.ndarray:
            return sum((f * t for f, t in zip(factors, tables, strict=True)), np.zeros_like(tables[0]))

        nodes = tuple(_node(nodes, mean) for nodes in zip(*(model.problem.nodes for model in models), strict=True))
        nets = tuple(_net(nets, mean) for nets in zip(*(model.problem.nets for model in models), strict=True))
        return replace(models[0], problem=replace(models[0].problem, nodes=nodes, nets=nets), plain=None)

    def even(self, length: float, microbatches: int) -> float:
        """The least length of a step under any division of the model among places, as a share of `length`, that of the
        balanced division.

        With one stage on each place, a step takes (m - 1) L + sum t_p. Taking work from the slowest place s lengthens L
        and shortens the sum; the step gets longer as long as m - 1 >= sum of (t_s / t_p - 1), and the share is 1. With
        fewer microbatches, only the m L of the slowest place are certain.
        """
        least = min(self.shares)
        enough = microbatches - 1 >= sum(
            n * (share / least - 1) for n, share in zip(self.counts, self.shares, strict=True)
        )
        return 1.0 if enough else microbatches / self.places / length


Tables = Callable[[list[np.ndarray]], np.ndarray]


def _node(nodes: Sequence[Node], mean: Tables) -> Node:
    """A node with the mean of the costs of `nodes`."""
    return replace(nodes[0], cost_s=mean([node.cost_s for node in nodes]), hide_s=mean([node.hide_s for node in nodes]))


def _net(nets: Sequence[Net], mean: Tables) -> Net:
    """A net with the mean of the costs of `nets`."""
    return replace(nets[0], cost_s=mean([net.cost_s for net in nets]))
