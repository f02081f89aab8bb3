"""What a step of one stage and one microbatch costs: its Problem's parts, with what hides found for each pass
(pipeline.passes).

    time = forward + backward of all pieces, sums of gradients behind the backward    + the optimizer
         - what lanes save, that work side by side
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.pipeline.passes import Passes
from autopar.pipeline.work import BACKWARD, FORWARD
from autopar.problem.build import Model
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Cost, Problem

ROUNDING = 1e-9  # relative: what is less is the rounding of sums


def step_cost(model: Model, choice: tuple[int, ...], forward: ForwardPrices) -> Cost:
    """The Cost of a solution as it runs. `forward` are prices on the same mesh. Raises InfeasibleError as
    Problem.evaluate does."""
    found = model.problem.evaluate(choice)
    if model.prices.overlap == 0.0 and not model.prices.settings.training:
        return found  # nothing hides, and nothing is summed
    did = Passes(model.links[0].program, model, choice, forward, apart=False, sums_at_end=False)
    took = did.seconds(model.prices.contention, shared=model.prices.overlap == 0.0, at_once=True)
    passed_s = sum(seconds[FORWARD] + seconds[BACKWARD] for seconds in took.values())
    updates_s = sum(model.update_s(index, c) for index, c in enumerate(choice))
    time_s = passed_s + updates_s - _side_by_side_s(model.problem, choice)
    moved_s = sum(
        part.waited.all_s + part.after.all_s + part.background_s
        for piece in did.did.values()
        for part in (piece.passes[FORWARD], piece.passes[BACKWARD])
    )
    exposed_s = time_s - found.compute_s
    hidden_s = moved_s - exposed_s
    least_s = ROUNDING * time_s
    return replace(
        found,
        time_s=time_s,
        exposed_s=exposed_s if abs(exposed_s) > least_s else 0.0,
        hidden_s=hidden_s if hidden_s > least_s else 0.0,
    )


def _side_by_side_s(problem: Problem, choice: tuple[int, ...]) -> float:
    """Seconds that lanes save against one after the other."""
    lanes = np.zeros((len(problem.lanes), 1))
    for node, c in zip(problem.nodes, choice, strict=True):
        if node.lane is not None and node.lane[c] >= 0:
            lanes[node.lane[c]] += node.cost_s[c]
    return float(lanes.sum() - problem.abreast_s(lanes)[0])
