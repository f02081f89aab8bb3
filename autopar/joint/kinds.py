"""Places of several kinds: which part of the cluster each is in, and the Problems of a model that all kinds of places share.

    grounds     for each order of the cluster's parts: the places, the kind and the memory of each
    Mixed       Problems whose numbers stand for all kinds: choices are the same on every place

Faster places get more of the model. A step that is balanced takes as long as its work on any place; where place p would take t_p for all
of the model it does L / t_p of it, with L = 1 / (1/t_1 + 1/t_2 + ...). What another choice adds to t_p adds (L / t_p)^2 as much to L: that is
what a place weighs in the choice (`weights`), with t_p by the work at the best rates of its device. What is proven is of the least that any
place can take (`floor`): the slowest place takes at least the sum over all pieces of the least over places p of L t(piece, p) / t_p.
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
    def of(counts: Sequence[int], work_s: Sequence[float]) -> Weights:
        """For places that take `work_s` for all of the model."""
        whole = sum(n / seconds for n, seconds in zip(counts, work_s, strict=True))
        return Weights(tuple(counts), tuple(1 / seconds / whole for seconds in work_s))

    @cached_property
    def places(self) -> int:
        """How many there are of all kinds."""
        return sum(self.counts)

    def meant(self, models: Sequence[Model]) -> Model:
        """The Problem that choices are made by: seconds of the whole model on a place that is as fast as all are on average."""
        factors = [self.places * n * share**2 for n, share in zip(self.counts, self.shares, strict=True)]
        return _combined(models, lambda tables: sum((f * t for f, t in zip(factors, tables, strict=True)), np.zeros_like(tables[0])))

    def floor(self, models: Sequence[Model]) -> Model:
        """The Problem whose bound holds for every way to deal pieces to places."""
        scaled = [self.places * share for share in self.shares]
        return _combined(models, lambda tables: np.min([f * t for f, t in zip(scaled, tables, strict=True)], axis=0),
                         lambda tables: np.max([f * t for f, t in zip(scaled, tables, strict=True)], axis=0))


Tables = Callable[[list[np.ndarray]], np.ndarray]


def _combined(models: Sequence[Model], cost: Tables, hide: Tables | None = None) -> Model:
    """One Model whose seconds are those of all, table by table; bytes are the same on all kinds of places."""
    first = models[0].problem
    nodes = tuple(_node(nodes, cost, hide or cost) for nodes in zip(*(model.problem.nodes for model in models), strict=True))
    nets = tuple(_net(nets, cost) for nets in zip(*(model.problem.nets for model in models), strict=True))
    return replace(models[0], problem=replace(first, nodes=nodes, nets=nets), plain=None)


def _node(nodes: Sequence[Node], cost: Tables, hide: Tables) -> Node:
    return replace(nodes[0], cost_s=cost([node.cost_s for node in nodes]), hide_s=hide([node.hide_s for node in nodes]))


def _net(nets: Sequence[Net], cost: Tables) -> Net:
    return replace(nets[0], cost_s=cost([net.cost_s for net in nets]))
