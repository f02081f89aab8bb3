"""A Problem in which some blocks run again in the backward: the same choices, other seconds and bytes.

    seconds   more: operators of the forward that run again (problem.rerun), with their collectives and reshards. A
              weight that is gathered for that is there for the backward too, and not gathered once more
    bytes     from forward to backward: one tensor per instance and placeholder of the block, and results that are kept.
              Beside that, once: all that one instance saves while it has been run again (`live_bytes`)

The live bytes of several scopes add up here, although one scope runs again at a time: a little too much, but linear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from autopar.problem.build import Model
from autopar.problem.graph import Program
from autopar.problem.kept_bytes import apart
from autopar.problem.nets import Link, bytes_alone, net_bytes, node_bytes, shown, step_s
from autopar.problem.rerun import Rerun, heavy, rerun
from autopar.problem.saved import Kept, kept
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Cost, Net, Node
from autopar.text import gibibytes, seconds

LEVELS = ("none", "selective", "full")
"""Nothing is run again; all but products, convolutions and attention; everything."""

Levels = Mapping[str, Collection[str]]
"""Scope -> the nodes whose results are kept; a scope that is absent is not run again. What `Plan.remat` says."""


def levels(program: Program, level: str) -> dict[str, tuple[str, ...]]:
    """Every run of blocks at one of LEVELS, as `Plan.remat` wants it."""
    if level == "none":
        return {}
    wanted = [op.name for op in program.ops.values() if level == "selective" and heavy(op)]
    reruns = {scope: rerun(program, scope, wanted) for scope in program.runs}
    return {scope: tuple(name for name in about.order if name in about.kept) for scope, about in reruns.items()}


def rematerialised(model: Model, forward: ForwardPrices, wanted: Levels) -> Model:
    """`model`, a Problem in which nothing is run again, with the scopes of `wanted` run again. `forward` are the prices
    of the forward on the same mesh. Choices that work on one coordinate of an axis are forbidden there (ranks would not
    end at the same place)."""
    if not wanted:
        return model
    program = model.links[0].program
    reruns = {scope: rerun(program, scope, names) for scope, names in wanted.items()}
    before, after = kept(model.clusters, program), kept(model.clusters, program, reruns)
    nodes = tuple(_node(model, index, node, forward, before, after) for index, node in enumerate(model.problem.nodes))
    links, nets = _of_stored(model, after)
    nets = [
        *(_net(link, net, model, forward, after) for link, net in zip(model.links, model.problem.nets, strict=True)),
        *nets,
    ]
    problem = replace(model.problem, nodes=nodes, nets=tuple(nets))
    return replace(model, problem=problem, links=[*model.links, *links], plain=model.problem)


def price(again: Cost, plain: Cost) -> str:
    """A line of text for users: the seconds that running blocks again (`again`) costs, and the bytes that it saves,
    against the same choices with nothing run again (`plain`)."""
    return (
        f"running blocks again takes {seconds(again.time_s - plain.time_s)} of the step and saves "
        f"{gibibytes(plain.memory_bytes - again.memory_bytes)} per device"
    )


def _node(model: Model, index: int, node: Node, forward: ForwardPrices, before: Kept, after: Kept) -> Node:
    """A node of `model` with what runs again of its operators, and what these keep."""
    cluster, members = model.clusters[index], model.members[index]
    about = after.reruns.get(cluster.scope)
    if about is None or cluster.root.role == "param":
        return node
    seconds, hide = np.zeros(len(node.labels)), np.zeros(len(node.labels))
    for member in members:
        again = member.op.name in about.again
        if again or (about.reached(member.op.name) and any(member.runs)):
            wanted = None if again else member.runs
            again_s, under_s = member.both(forward.work_s, wanted)
            seconds += again_s
            hide += under_s
    plain, stays = (node_bytes(index, members, keeps, model.prices) for keeps in (before, after))
    live = np.maximum(plain - stays, 0.0) / cluster.root.count + (0.0 if node.live_bytes is None else node.live_bytes)
    cost_s = np.where(members[-1].placed, np.inf, node.cost_s + seconds)
    return replace(node, cost_s=cost_s, hide_s=node.hide_s + hide, memory_bytes=stays + live, live_bytes=live)


def _net(link: Link, net: Net, model: Model, forward: ForwardPrices, after: Kept) -> Net:
    """A net of `model` with the reshards that run again, and the bytes that it counts now."""
    scope = link.readers[0][0].scope if link.kind == "edge" else ""
    about = after.reruns.get(scope)
    if about is None:
        return net if link.weight else replace(net, memory_bytes=net_bytes(link, after, model.prices, set()))
    if not link.weight:
        net = _held(link, net, model, after, _stored(link, about)[:, None])
    if not link.moves:
        return net
    runs = link.asked_by(lambda op, operand: (op.name, operand) in about.reads)
    again_s = forward.moves_s(link.rows, link.columns, link.size_bytes) * link.count
    moves = np.array([[row[0] != column[0] for column in link.columns] for row in link.rows])
    stored = moves & _stored(link, about)[:, None]
    counted = np.array([c in runs for c in range(len(link.columns))]) & ~stored
    cost = np.where(
        np.isinf(net.cost_s), np.inf, step_s(link, model.prices, set(), set()) + np.where(counted, again_s, 0.0)
    )
    if link.weight:
        return replace(
            net,
            cost_s=cost,
            memory_bytes=net_bytes(link, after, model.prices, set()),
            shown=shown(link, model.prices, cost, 1.0 + counted),
        )
    return replace(net, cost_s=cost)


def _stored(link: Link, about: Rerun) -> np.ndarray:
    """bool [rows]: for a net to operators of a block that runs again, whether its value is stored for the second run. A
    value that a runtime algorithm makes is not: the algorithm runs again."""
    return (link.ref[0] in about.kept) & ~link.by_algorithm


def _held(link: Link, net: Net, model: Model, after: Kept, stored: np.ndarray) -> Net:
    """`net` with the bytes of a value that operators of a block need in the second run. Where the value is not `stored`
    it exists only while one instance has been run again."""
    live = np.where(stored, 0.0, net.memory_bytes / link.count)
    held = net_bytes(apart(link, after)[0], after, model.prices, set()) if link.moves and stored.any() else 0.0
    return replace(net, memory_bytes=np.where(stored, held, live), live_bytes=live)


def _of_stored(model: Model, after: Kept) -> tuple[list[Link], list[Net]]:
    """The links and nets that count only bytes of stored values. More readers need such a value than those whose
    backward keeps it."""
    links, nets = [], []
    for link in model.links:
        about = after.reruns.get(link.readers[0][0].scope)
        if about is not None and link.moves and (stored := _stored(link, about)).any():
            for other in apart(link, after)[1]:
                net = bytes_alone(other, after, model.prices)
                links.append(other)
                nets.append(replace(net, memory_bytes=np.where(stored[:, None], net.memory_bytes, 0.0)))
    return links, nets
