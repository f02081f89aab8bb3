"""What joint.relaxed is given: the steps of one stage and one microbatch, and of a timetable, with the memory that they have."""

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
from autopar.problem.pass_tables import BACKWARD, INPUTS, PASSES, SHOWN, PassTables
from autopar.problem.types import Net, Node


def alone(passing: PassTables, bytes_of: Model, limit_bytes: float, *, hosted: bool = False) -> Relaxed:
    """One stage and one microbatch (pipeline.single_stage), with the memory of `bytes_of`, a Model with the same choices; `hosted`: with no memory for weights, and no optimizer's step."""
    problem, held = passing.model.problem, bytes_of.problem
    node_s = [passing.updates_s[index] * (not hosted) - _abreast_s(passing.model, node) for index, node in enumerate(problem.nodes)]
    nothing = [np.zeros(net.cost_s.shape) for net in problem.nets]
    shared = bytes_of.shared  # other nets count bytes of what is stored of blocks that run again: without them it is a bound all the same
    nodes = [node.memory_bytes * _counts(_rests(cluster), hosted) for node, cluster in zip(held.nodes, bytes_of.clusters, strict=True)]
    nets = [net.memory_bytes * _counts(link.weight, hosted) for net, link in zip(held.nets[:shared], bytes_of.links, strict=False)]
    room = [Room(nodes, [*nets, *nothing[shared:]], limit_bytes)] if math.isfinite(limit_bytes) else []
    return Relaxed(passing, _times(passing, 1.0, 1.0), node_s, nothing, tuple(room))


def timed(passing: PassTables, bytes_of: Model, models: Models, table: Timetable, weights: Least, limit_bytes: float, *, hosted: bool = False) -> Relaxed:
    """A step under `table`, which is `weights` long at least, with the memory of `bytes_of`, a Model with the same choices as all `models`; `hosted` as `alone` has it."""
    once = models.once
    node_s = [weights.once * (not hosted) * once.updates_s(index) + weights.inputs * table_.each[BACKWARD, :, INPUTS] for index, table_ in enumerate(passing.nodes)]
    between = passing.between or frozenset()
    net_s = [weights.once * each for each in _once_s(passing, once)]
    return Relaxed(passing, _times(passing, weights.forward, weights.backward), node_s, net_s, tuple(_held(bytes_of, passing.model, once, table, limit_bytes, between, hosted=hosted)),
                   fixed_s=weights.fixed_s)


def in_one_place(passing: PassTables, models: Models, microbatches: int, share: float, piece: int | None = None, *, hosted: bool = False) -> Relaxed:
    """What a place takes at least that has the `share` of the blocks of the one run there is, and of what is outside the operator of node `piece`, for so many
    microbatches and once per step; with all the memory there is. `hosted`: without the optimizer's step."""
    scope, once = next(iter(passing.model.links[0].program.runs)), models.once
    node_s = [share * (not hosted) * once.updates_s(index) * (cluster.scope == scope) for index, cluster in enumerate(once.clusters)]
    if piece is not None:
        node_s[piece] = node_s[piece] + microbatches * passing.nodes[piece].each[..., SHOWN].sum(0)
    net_s = [share * each * (link.cluster.scope == scope) for link, each in zip(passing.model.links, _once_s(passing, once), strict=True)]
    return Relaxed(passing, {(scope, way): share * microbatches for way in PASSES}, node_s, net_s)


def _times(passing: PassTables, forward: float, backward: float) -> dict[Key, float]:
    """All passes so many times over."""
    return {(scope, way): times for scope in passing.scopes for way, times in zip(PASSES, (forward, backward), strict=True)}


def _once_s(passing: PassTables, once: Model) -> list[np.ndarray]:
    """What the nets of weights that are each read in one place take once per step, and nothing for all others: nor for those that `passing` has behind the nets of
    `once`, which count bytes alone."""
    found = [_finite(net.cost_s) * (link.weight and not passing.shared[link.ref]) for link, net in zip(once.links, once.problem.nets, strict=True)]
    return [*found, *(np.zeros(net.cost_s.shape) for net in passing.model.problem.nets[len(found):])]


def _held(micro: Model, priced: Model, once: Model, table: Timetable, limit_bytes: float, between: frozenset[int], *, hosted: bool) -> Iterator[Room]:
    """On one place what rests, what one microbatch keeps, and what is there while the longest run of blocks runs. On several places q, of which each stage keeps
    n_q microbatches at least when the place keeps most, and with any weights w_q: sum w_q limit >= the least w_q times what rests + the least w_q n_q times what a microbatch keeps.
    Counted by `micro`, for the nets of `priced`: where that is another Model it has others behind them, of what is stored of blocks that run again, and it is a bound without these."""
    if math.isinf(limit_bytes):
        return
    kept = [max(1, min(n.kept for n, at in zip(table.flying, table.at, strict=True) if at == place)) for place in range(table.places)]
    live = float(table.places == 1)
    for weights in dict.fromkeys(((1.0,) * table.places, tuple(1 / n for n in kept))):
        held = min(w * n for w, n in zip(weights, kept, strict=True))
        nodes = [_counts(_rests(cluster), hosted) * (held * (node.memory_bytes - _live(node)) + min(weights) * rests.memory_bytes
                                                                  + live * _in_blocks(micro, cluster.scope) * _live(node))
                 for node, rests, cluster in zip(micro.problem.nodes, once.problem.nodes, micro.clusters, strict=True)]
        nets = [(held * (net.memory_bytes - _live(net)) + live * _in_blocks(micro, _reading(link)) * _live(net)) * (index not in between) * _counts(link.weight, hosted)
                for index, (net, link) in enumerate(zip(micro.problem.nets, micro.links, strict=True))]
        if priced is not micro:
            nets = [*nets[:micro.shared], *(np.zeros(net.cost_s.shape) for net in priced.problem.nets[micro.shared:])]
        yield Room(nodes, nets, sum(weights) * limit_bytes, held)


def _counts(weight: bool, hosted: bool) -> float:
    """1 for what takes memory of the device: all but weights, and what is made of them, where these may be on the host."""
    return float(not (weight and hosted))


def _rests(cluster: Cluster) -> bool:
    """Whether weights rest with the operators of a cluster."""
    return any(op.role == "param" for op in cluster.members)


def between_pieces(model: Model) -> frozenset[int]:
    """The nets, by number, whose value may be made on another place than where it is read, or in another block."""
    program = model.links[0].program
    home = homes(program, units(program))
    return frozenset(index for index, link in enumerate(model.links) if link.kind != "edge" or any(home[op.name] != home[link.ref[0]] for op, _ in link.readers))


def _in_blocks(model: Model, scope: str) -> float:
    """1 in the longest run of blocks, 0 elsewhere."""
    runs = model.links[0].program.runs
    return float(bool(runs) and scope == max(runs, key=lambda name: runs[name].count))


def _reading(link: Link) -> str:
    return link.readers[0][0].scope


def _live(part: Node | Net) -> np.ndarray:
    """Bytes that are there for a while only."""
    if isinstance(part, Net) and part.group >= 0:
        return part.memory_bytes
    return np.zeros(part.memory_bytes.shape) if part.live_bytes is None else part.live_bytes


def _abreast_s(model: Model, node: Node) -> np.ndarray:
    """Seconds that a choice can save at most by working beside others in lanes: the largest of n lanes is no less than their mean."""
    lanes = model.problem.lanes
    if node.lane is None:
        return np.zeros(len(node.cost_s))
    beside = np.array([1.0 if lane < 0 else lanes.count(lanes[lane]) for lane in node.lane])
    return _finite(node.cost_s) * (1.0 - 1.0 / beside)


def _finite(cost_s: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(cost_s), cost_s, 0.0)
