"""Relaxed steps (joint.relaxed) of one stage and one microbatch, of a timetable, and of one place, with their memory
limits. Called by shape_bounds.

`hosted` in all of them: parameters may be on the host, so that their memory and the optimizer's step count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autopar.joint.relaxed import Key, Relaxed, Room
from autopar.joint.shape_problems import Models
from autopar.joint.timetables import Timetable
from autopar.pipeline.makespan_bound import Least
from autopar.pipeline.units import homes, units
from autopar.problem.build import Model
from autopar.problem.clusters import Cluster
from autopar.problem.nets import Link
from autopar.problem.pass_quantities import INPUTS
from autopar.problem.pass_tables import BACKWARD, PASSES, PassTables
from autopar.problem.types import Net, Node


def alone(passing: PassTables, bytes_of: Model, limit_bytes: float, *, hosted: bool = False) -> Relaxed:
    """A step of one stage and one microbatch (pipeline.single_stage). Bytes are those of `bytes_of`, a Model with the
    same choices."""
    problem, held = passing.model.problem, bytes_of.problem
    node_s = [
        passing.model.updates_s[index] * (not hosted) - _abreast_s(passing.model, node)
        for index, node in enumerate(problem.nodes)
    ]
    nothing = [np.zeros(net.cost_s.shape) for net in problem.nets]
    shared = bytes_of.shared  # further nets count what blocks that run again store: leaving bytes out keeps it a bound
    nodes = [
        node.memory_bytes * _counts(_rests(cluster), hosted)
        for node, cluster in zip(held.nodes, bytes_of.clusters, strict=True)
    ]
    nets = [
        net.memory_bytes * _counts(link.weight, hosted)
        for net, link in zip(held.nets[:shared], bytes_of.links, strict=False)
    ]
    room = [Room(nodes, [*nets, *nothing[shared:]], limit_bytes)] if math.isfinite(limit_bytes) else []
    return Relaxed(passing, _times(passing, 1.0, 1.0), node_s, nothing, tuple(room))


def timed(
    passing: PassTables,
    bytes_of: Model,
    models: Models,
    table: Timetable,
    weights: Least,
    limit_bytes: float,
    *,
    hosted: bool = False,
) -> Relaxed:
    """A step under `table`, whose seconds are bounded by `weights` (pipeline.makespan_bound). Bytes are those of
    `bytes_of`, a Model with the same choices as `models`."""
    once = models.once
    node_s = [
        weights.once * (not hosted) * once.updates_s[index] + weights.inputs * table_.each[BACKWARD, :, INPUTS]
        for index, table_ in enumerate(passing.nodes)
    ]
    between = passing.between or frozenset()
    net_s = [weights.beside * beside_s for beside_s in _beside_s(passing, once)]
    return Relaxed(
        passing,
        _times(passing, weights.forward, weights.backward),
        node_s,
        net_s,
        tuple(_held(bytes_of, passing.model, once, table, limit_bytes, between, hosted=hosted)),
        fixed_s=weights.fixed_s,
        chained=True,
    )


def in_one_place(
    passing: PassTables,
    models: Models,
    microbatches: int,
    share: float,
    *,
    beside_s: float = 0.0,
    hosted: bool,
) -> Relaxed:
    """A lower bound of the seconds of a place that has the `share` of the only run of blocks, and outside of blocks
    what takes `beside_s` per microbatch, for all `microbatches`, once-per-step costs included. Without memory
    limits."""
    scope, times = next(iter(passing.model.links[0].program.runs)), share * microbatches
    return of_scope(passing, models, scope, (times, times, share), fixed_s=microbatches * beside_s, hosted=hosted)


def of_scope(
    passing: PassTables,
    models: Models,
    scope: str,
    times: tuple[float, float, float],
    *,
    sums: float = 0.0,
    fixed_s: float = 0.0,
    hosted: bool,
) -> Relaxed:
    """A lower bound of the seconds of one scope alone, without memory limits. `times`: how often its forward, its
    backward and what happens once per step count, and `sums` of gradients that other work may overlap."""
    forward, backward, once_times = times
    program = passing.model.links[0].program
    node_s = [
        once_times * (not hosted) * models.once.updates_s[index] * (program.scope_of(cluster.scope) == scope)
        for index, cluster in enumerate(models.once.clusters)
    ]
    net_s = [
        sums * beside_s * (program.scope_of(link.cluster.scope) == scope)
        for link, beside_s in zip(passing.model.links, _beside_s(passing, models.once), strict=True)
    ]
    passes = {(scope, way): each for way, each in zip(PASSES, (forward, backward), strict=True)}
    return Relaxed(passing, passes, node_s, net_s, fixed_s=fixed_s)


def _times(passing: PassTables, forward: float, backward: float) -> dict[Key, float]:
    """The forward and backward of all scopes, each so many times."""
    return {
        (scope, way): times for scope in passing.scopes for way, times in zip(PASSES, (forward, backward), strict=True)
    }


def _beside_s(passing: PassTables, once: Model) -> list[np.ndarray]:
    """For each net of `passing`, seconds [rows, columns] of sums of gradients once per step, of weights with one
    reader; 0 for all others, and for further nets, which only count bytes. Gathers of leaves may cost nothing, where
    other work overlaps them."""
    found = [
        net.hideable_s * (link.weight and not passing.shared[link.ref])
        for link, net in zip(once.links, once.problem.nets, strict=True)
    ]
    return [*found, *(np.zeros(net.cost_s.shape) for net in passing.model.problem.nets[len(found) :])]


def _held(
    micro: Model,
    priced: Model,
    once: Model,
    table: Timetable,
    limit_bytes: float,
    between: frozenset[int],
    *,
    hosted: bool,
) -> Iterator[Room]:
    """The memory limits of a step under `table`.

    On one place: parameters with their state, what one microbatch keeps, and what exists only while the longest run of
    blocks runs. On several places q, each stage of which keeps at least n_q microbatches at the place's peak, the sum
    of their limits with any weights w_q >= 0 gives

        sum of w_q limit >= (min of w_q) x bytes of parameters + (min of w_q n_q) x bytes that a microbatch keeps

    for the whole model; used are w = 1 and w = 1 / n. Bytes are those of `micro`. `priced` may have further nets, of
    what blocks that run again store; leaving these out keeps it a bound.
    """
    if math.isinf(limit_bytes):
        return
    kept = [max(1, min(n.kept for n in table.of_place(place, table.flying))) for place in range(table.places)]
    for weights in dict.fromkeys(((1.0,) * table.places, tuple(1 / n for n in kept))):
        held, live = min(w * n for w, n in zip(weights, kept, strict=True)), weights[0] * (table.places == 1)
        nodes = [
            _counts(_rests(cluster), hosted)
            * (
                held * (node.memory_bytes - _live(node))
                + min(weights) * rests.memory_bytes
                + live * _in_blocks(micro, cluster.scope) * _live(node)
            )
            for node, rests, cluster in zip(micro.problem.nodes, once.problem.nodes, micro.clusters, strict=True)
        ]
        nets = [
            (held * (net.memory_bytes - _live(net)) + live * _in_blocks(micro, _reading(link)) * _live(net))
            * (index not in between)
            * _counts(link.weight, hosted)
            for index, (net, link) in enumerate(zip(micro.problem.nets, micro.links, strict=True))
        ]
        if priced is not micro:
            nets = [*nets[: micro.shared], *(np.zeros(net.cost_s.shape) for net in priced.problem.nets[micro.shared :])]
        yield Room(nodes, nets, sum(weights) * limit_bytes, held)


def kept_bytes(model: Model, nets: int, scope: str, between: frozenset[int], *, hosted: bool) -> float:
    """The fewest bytes that a microbatch of `model` keeps of `scope` ("": of all that is outside of blocks), over all
    choices, each of its nodes and of its first `nets` nets by itself; without those `between` pieces."""
    program, problem = model.links[0].program, model.problem
    return sum(
        _counts(_rests(cluster), hosted) * float((node.memory_bytes - _live(node)).min())
        for cluster, node in zip(model.clusters, problem.nodes, strict=True)
        if program.scope_of(cluster.scope) == scope
    ) + sum(
        _counts(link.weight, hosted) * float((net.memory_bytes - _live(net)).min())
        for index, (link, net) in enumerate(zip(model.links[:nets], problem.nets[:nets], strict=True))
        if index not in between and program.scope_of(_reading(link)) == scope
    )


def rests_bytes(once: Model, scope: str, *, hosted: bool) -> float:
    """The fewest bytes that the parameters of `scope` take with their gradients and state; as `kept_bytes`."""
    program = once.links[0].program
    return sum(
        _counts(_rests(cluster), hosted) * float(node.memory_bytes.min())
        for cluster, node in zip(once.clusters, once.problem.nodes, strict=True)
        if program.scope_of(cluster.scope) == scope
    )


def _counts(weight: bool, hosted: bool) -> float:
    """1 for what is in device memory in any case, 0 for weights, and for what is made of them, if these may be on the
    host."""
    return float(not (weight and hosted))


def _rests(cluster: Cluster) -> bool:
    """Whether a cluster has parameters."""
    return any(op.role == "param" for op in cluster.members)


def between_pieces(model: Model) -> frozenset[int]:
    """The nets, by number, whose value may be read on another place, or in another block, than where it is made."""
    program = model.links[0].program
    home = homes(program, units(program))
    return frozenset(
        index
        for index, link in enumerate(model.links)
        if link.kind != "edge" or any(home[op.name] != home[link.ref[0]] for op, _ in link.readers)
    )


def _in_blocks(model: Model, scope: str) -> float:
    """1 in the longest run of blocks, 0 elsewhere."""
    runs = model.links[0].program.runs
    return float(bool(runs) and scope == max(runs, key=lambda name: runs[name].count))


def _reading(link: Link) -> str:
    """The scope of the first reader of a value."""
    return link.readers[0][0].scope


def _live(part: Node | Net) -> np.ndarray:
    """The bytes that exist only while a piece runs."""
    if isinstance(part, Net) and part.group >= 0:
        return part.memory_bytes
    return np.zeros(part.memory_bytes.shape) if part.live_bytes is None else part.live_bytes


def _abreast_s(model: Model, node: Node) -> np.ndarray:
    """[choices] the most seconds that a choice saves by running in a lane beside others: with n lanes the longest takes
    at least their mean."""
    return _finite(node.cost_s) * (1.0 - 1.0 / model.problem.beside(node))


def _finite(cost_s: np.ndarray) -> np.ndarray:
    """The costs, with 0 for impossible choices."""
    return np.where(np.isfinite(cost_s), cost_s, 0.0)
