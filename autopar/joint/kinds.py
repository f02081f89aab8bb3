"""Places of several kinds: which part of the cluster each is in, and the Problems of a model that all kinds of places share.

    grounds     for each order of the cluster's parts: the places, the kind and the memory of each
    Weights     what each kind of place weighs in a Problem whose choices are the same on every place

Faster places get more of the model. A step that is balanced takes as long as its work on any place; where place p would take t_p for all
of the model it does L / t_p of it, with L = 1 / (1/t_1 + 1/t_2 + ...). What another choice adds to t_p adds (L / t_p)^2 as much to L: that is
what a place weighs, with t_p by the work at the best rates of its device. Where choices change t_p in other proportions (a place on slow
links), sum (L / t_p)^2 t_p is above the true L by a share of the second order of the difference: proportions that are wrong by a third give 2 to 3 %.
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
    """The places of a shape with the parts of the cluster in one order: for each place the number of its kind, and the bytes that a plan may
    fill there."""

    places: Places
    kinds: tuple[int, ...]
    limits: tuple[float, ...]


def distinct(cluster: Cluster) -> list[Cluster]:
    """The parts of a cluster that differ; the cluster itself where it has none."""
    return list(dict.fromkeys(cluster.parts)) or [cluster]


def grounds(cluster: Cluster, count: int, sizes: tuple[int, ...], limit: Callable[[Places, int], float]) -> list[Ground]:
    """All of them; `limit` says how many bytes there are on a place."""
    parts, found = distinct(cluster), []
    for ordered in orders(cluster) if count > 1 else [cluster]:
        at = Places(ordered, count, sizes)
        kinds = tuple(parts.index(at.part(place)) if at.mixed else 0 for place in range(count))
        found.append(Ground(at, kinds, tuple(limit(at, place) for place in range(count))))
    return found


@dataclass(frozen=True, eq=False)
class Weights:
    """For each kind of place how many there are, and the share of a balanced step's work that one of them does."""

    counts: tuple[int, ...]
    shares: tuple[float, ...]

    @staticmethod
    def of(counts: Sequence[int], paces: Sequence[float]) -> Weights:
        """For places that do all of the model so often in a second."""
        whole = sum(n * pace for n, pace in zip(counts, paces, strict=True))
        return Weights(tuple(counts), tuple(pace / whole for pace in paces))

    @cached_property
    def places(self) -> int:
        """How many there are of all kinds."""
        return sum(self.counts)

    def meant(self, models: Sequence[Model]) -> Model:
        """The Problem that choices are made by: seconds of the whole model on a place that is as fast as all are on average."""
        factors = [self.places * n * share**2 for n, share in zip(self.counts, self.shares, strict=True)]

        def mean(tables: list[np.ndarray]) -> np.ndarray:
            return sum((f * t for f, t in zip(factors, tables, strict=True)), np.zeros_like(tables[0]))

        nodes = tuple(_node(nodes, mean) for nodes in zip(*(model.problem.nodes for model in models), strict=True))
        nets = tuple(_net(nets, mean) for nets in zip(*(model.problem.nets for model in models), strict=True))
        return replace(models[0], problem=replace(models[0].problem, nodes=nodes, nets=nets), plain=None)

    def even(self, length: float, microbatches: int) -> float:
        """Which share of a step of `length`, of balanced places, no other way to deal the model has less than.

        With one stage on each place a step takes (m - 1) L + sum t_p; to take work from the slowest place s makes L longer and the sum shorter, and
        the step longer as long as m - 1 >= sum of (t_s / t_p - 1). With fewer microbatches only the m L of the slowest place are sure.
        """
        least = min(self.shares)
        enough = microbatches - 1 >= sum(n * (share / least - 1) for n, share in zip(self.counts, self.shares, strict=True))
        return 1.0 if enough else microbatches / self.places / length


Tables = Callable[[list[np.ndarray]], np.ndarray]


def _node(nodes: Sequence[Node], mean: Tables) -> Node:
    return replace(nodes[0], cost_s=mean([node.cost_s for node in nodes]), hide_s=mean([node.hide_s for node in nodes]))


def _net(nets: Sequence[Net], mean: Tables) -> Net:
    return replace(nets[0], cost_s=mean([net.cost_s for net in nets]))
