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
from autopar.problem.types import Net


def separable(model: Model) -> Model:
    """`model`, in which nothing is run again, without choices that gather a weight again for the backward: they cost
    infinitely many seconds."""
    problem = model.problem
    nets = tuple(_net(model, link, net) for link, net in zip(model.links, problem.nets, strict=True))
    return replace(model, problem=replace(problem, nets=nets)).without(_tiled(model))


def _tiled(model: Model) -> dict[int, np.ndarray]:
    """bool [choices] for each cluster with choices that gather some weight in tiles: which ones these are."""
    found = {
        index: [np.array(member.tiles)[member.at] for member in members if any(member.tiles)]
        for index, members in enumerate(model.members)
    }
    return {index: np.any(tiled, axis=0) for index, tiled in found.items() if tiled}


def _net(model: Model, link: Link, net: Net) -> Net:
    if not (link.weight and link.moves):
        return net
    again = link.asked_by(lambda op, operand: op.needs_again(operand))
    twice = model.prices.routes.between(link.rows, link.columns).regathers & np.array(
        [column in again for column in range(len(link.columns))]
    )
    return replace(net, cost_s=np.where(twice, np.inf, net.cost_s)) if twice.any() else net
