"""The groups of ranks that hold the same weights under a given configuration, and the groups over which these are
sharded. Called by predict.step for the collectives of data parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster, MeshAxis, Span
from benchmarks.costmodel.predict.setup import Setup


def line(cluster: Cluster, inner: int, size: int) -> MeshAxis:
    """An axis of `size` devices, neighbours on it being `inner` devices apart. Levels are filled from the innermost
    one; the factor of `inner` or `size` that does not divide a level goes to the next level."""
    spans: list[Span] = []
    for level in reversed(cluster.levels):
        taken = math.gcd(inner, level.size)
        inner //= taken
        room = level.size // taken
        here = size if level is cluster.levels[0] else math.gcd(size, room)
        if here > 1:
            spans.append(Span(level, here))
        size //= here
    return MeshAxis("line", math.prod(span.size for span in spans), tuple(reversed(spans)), cluster.device)


def between(axis: MeshAxis, one: int, other: int) -> MeshAxis:
    """What goes from one device of `axis` to another passes: its spans from the outermost on in which they are
    apart."""
    inside = axis.size
    for at, span in enumerate(axis.spans):
        inside //= span.size
        if one // inside != other // inside:
            return MeshAxis(axis.name, inside * span.size, axis.spans[at:], axis.device)
    return MeshAxis(axis.name, 1, (), axis.device)


@dataclass(frozen=True)
class Owners:
    """The ranks that compute with the same weights (`all`), in groups of neighbouring ranks over which the weights are
    sharded at rest (`shards`), and the ranks that hold copies of the same shard (`copies`)."""

    all: MeshAxis
    shards: MeshAxis
    copies: MeshAxis

    @staticmethod
    def of_dense(cluster: Cluster, setup: Setup) -> Owners:
        """For weights that all data-parallel and context-parallel ranks compute with."""
        shards = setup.dp // setup.replicas * setup.cp
        return Owners(
            line(cluster, setup.tp, setup.dp * setup.cp),
            line(cluster, setup.tp, shards),
            line(cluster, setup.tp * shards, setup.replicas),
        )

    @staticmethod
    def of_experts(cluster: Cluster, setup: Setup) -> Owners:
        """For a stack of experts. Expert-parallel ranks have different ones, so that the owners are every so many
        data-parallel ranks, and the context-parallel ranks beside each unless these have experts of their own."""
        apart, ways = setup.tp * setup.cp * setup.expert_ways, setup.dp // setup.expert_ways
        beside, shards = (
            line(cluster, setup.tp, 1 if setup.experts_over_context else setup.cp),
            max(1, ways // setup.replicas),
        )
        return Owners(
            joined(line(cluster, apart, ways), beside),
            joined(line(cluster, apart, shards), beside),
            line(cluster, apart * shards, ways // shards),
        )


def joined(outer: MeshAxis, inner: MeshAxis) -> MeshAxis:
    """The axis of all ranks of `inner` beside each rank of `outer`."""
    return MeshAxis("line", outer.size * inner.size, (*outer.spans, *inner.spans), outer.device)
