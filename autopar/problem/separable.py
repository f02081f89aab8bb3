"""A Problem whose choices leave the backward of every stage in one piece that zero-bubble schedules can take apart.

These schedules run the part of a backward for what a stage received first, and the part for its weights where the stage
would wait. A weight that is gathered again for the backward (ZeRO-3), whole or in tiles, would be gathered once for
each part, so that such a stage runs both as one (pipeline.stage_views.View.separable): the schedule then gains nothing
over 1F1B.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.problem.build import Model
from autopar.problem.nets import Link
from autopar.problem.types import Net, Node


def separable(model: Model) -> Model:
    """`model`, in which nothing is run again, without choices that gather a weight again for the backward: they cost
    infinitely many seconds."""
    problem = model.problem
    nodes = tuple(_node(model, index, node) for index, node in enumerate(problem.nodes))
    nets = tuple(_net(model, link, net) for link, net in zip(model.links, problem.nets, strict=True))
    return replace(model, problem=replace(problem, nodes=nodes, nets=nets))


def _node(model: Model, index: int, node: Node) -> Node:
    tiled = [np.array(member.tiles)[member.at] for member in model.members[index] if any(member.tiles)]
    return replace(node, cost_s=np.where(np.any(tiled, axis=0), np.inf, node.cost_s)) if tiled else node


def _net(model: Model, link: Link, net: Net) -> Net:
    if not (link.weight and link.moves):
        return net
    again = link.asked_by(lambda op, operand: op.needs_again(operand))
    twice = model.prices.routes.between(link.rows, link.columns).regathers & np.array(
        [column in again for column in range(len(link.columns))]
    )
    return replace(net, cost_s=np.where(twice, np.inf, net.cost_s)) if twice.any() else net
