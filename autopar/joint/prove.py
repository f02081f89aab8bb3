"""What no plan is faster than: every shape relaxed so far that a glance or three bound it, whatever is cut, scheduled and kept in memory there.

    relaxed   devices have all the memory there is (so nothing is run again, nothing is on a host, whose update is slower than a device's);
              a place has its share of the work of all microbatches, and never waits but for its first stage
    mean      a step takes what the place takes that has most to do, and so at least the mean over places. Place q begins with stage q at the
              earliest, behind q stages of one piece at least: the first q pieces forward, once. All schedules give their first stages to the
              places in order
    whole     blocks are not cut. Where the place of the heaviest other piece (the head) has at most k of N blocks, some other one has
              (N - k) / (places - 1) of them, rounded up; else that place has k + 1 and the piece. With the k for which the lesser is largest

All of it holds for all cuts, even or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.joint.inner import Inner
from autopar.joint.pricing import Pricing
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.problem.build import Model
from autopar.problem.floor import Work, by_piece
from autopar.problem.graph import Program
from autopar.problem.shares import Share, combined
from autopar.problem.types import Problem
from autopar.recipes.free import space, spaces
from autopar.search import ilp

GLANCE_S = 10.0  # seconds for one shape at most; none of those that were tried took one


def proven_s(inner: Inner, known_s: float) -> float:
    """Seconds that no plan beats, `known_s`, the step of one that there is, at most. On clusters of several parts that is only the least work."""
    prover = Prover(inner)
    least_s = known_s
    for shape in sorted(prover.shapes(), key=prover.floor_s):
        if prover.floor_s(shape) < least_s:
            inner.request.say(f"proving: {shape}")
            least_s = min(least_s, max(prover.floor_s(shape), prover.bound_s(shape, least_s)))
    return least_s


class Prover:
    """Bounds of all shapes of one graph."""

    def __init__(self, inner: Inner) -> None:
        self.inner, self.pricing = inner, Pricing(inner, SEARCH)
        cluster, program = inner.request.cluster, inner.whole.program
        each = by_piece(program, cluster.device, replace(inner.request.settings, mode="inference"))
        self._forward_s = [_of_one(program, each, unit.name) for unit in inner.units]  # of each piece, on one device, of the whole batch
        self._stack = _stack(inner)

    def shapes(self) -> list[Shape]:
        """One place and one microbatch on every mesh, and all that the search may choose beside that."""
        request = self.inner.request
        flat = [request.mesh] if request.mesh is not None else spaces(request.cluster, self.inner.whole.cuts_samples)
        return [*(Shape(1, mesh, 1) for mesh in flat), *(SEARCH.shapes(self.inner) if request.settings.training else ())]

    def floor_s(self, shape: Shape) -> float:
        """Its share of the least work there is."""
        return self.inner.work(shape.places).step_s(self.inner.request.cluster.devices, shape.places, shape.microbatches)

    def bound_s(self, shape: Shape, cutoff_s: float = math.inf) -> float:
        """Seconds that no plan on `shape` beats, not exact above `cutoff_s`; infinite where no operator has a choice."""
        if self.inner.request.cluster.parts:
            return 0.0
        try:
            model = self._relaxed(shape)
        except InfeasibleError:
            return math.inf
        wait_s = self._wait_s(shape)
        mean_s = wait_s + _glance(model.problem, cutoff_s - wait_s)
        if mean_s >= cutoff_s or shape.places == 1 or self._stack is None:
            return mean_s
        return max(mean_s, min(_glance(_weighed(model, weights), cutoff_s) for weights in self._stack.shares(shape.places)))

    def _relaxed(self, shape: Shape) -> Model:
        if shape.microbatches == 1:
            return self.inner.whole.model(shape.mesh, space(shape.mesh), str(shape)).with_limit(math.inf)
        models = self.pricing.models(shape)
        return combined(models.micro, models.once, Share(shape.microbatches / shape.places, 1 / shape.places, 0.0, 0.0), math.inf)

    def _wait_s(self, shape: Shape) -> float:
        """The mean over all places of the forward of one microbatch through the pieces that are in front of their first stage in any case."""
        device = self.inner.request.cluster.device
        before = [sum(self._forward_s[:place]) for place in range(shape.places)]
        ranks = self.inner.request.cluster.devices / shape.places * shape.microbatches * max(1.0, device.alone)
        return sum(before) / shape.places / ranks


def _of_one(program: Program, each: Mapping[str, Work], name: str) -> float:
    """Seconds of the rates of an operator, or of one block of a run."""
    alike = program.runs[name].count if name in program.runs else 1
    return each[name].rates_s / alike if name in each else 0.0


@dataclass(frozen=True)
class Stack:
    """`count` alike blocks, the scope `scope`, of `block_s` each, and the heaviest operator outside, `head`, of `head_s`; seconds on one device."""

    scope: str
    count: int
    block_s: float
    head: str
    head_s: float

    def shares(self, places: int) -> list[dict[str, float]]:
        """What some place has to do, one of these in any case: how many times an even share of all blocks, by scope, and of the operator, by name."""
        def most(k: int) -> int:
            return math.ceil((self.count - k) / (places - 1))

        split = max(range(self.count), key=lambda k: min(most(k) * self.block_s, (k + 1) * self.block_s + self.head_s))
        times = places / self.count
        return [{self.scope: most(split) * times}, {self.scope: (split + 1) * times, self.head: float(places)}]


def _stack(inner: Inner) -> Stack | None:
    """The longest run of blocks; None where there is none, or its first block has less to do than the others."""
    program = inner.whole.program
    run = max(program.runs.values(), key=lambda run: run.count, default=None)
    if run is None or run.count < 2 or any(op.scope == run.scope and (op.late or op.first_saves != op.saves) for op in program.ops.values()):
        return None
    each = by_piece(program, inner.request.cluster.device, inner.request.settings)
    single = [unit.name for unit in inner.units if unit.instance < 0 and unit.name in each]
    head = max(single, key=lambda name: each[name].rates_s, default="")
    return Stack(run.scope, run.count, each[run.scope].rates_s / run.count, head, each[head].rates_s if head else 0.0)


def _weighed(model: Model, weights: Mapping[str, float]) -> Problem:
    """The Problem of `model` with only what `weights` name, nodes and reads of a scope or the node of one operator, so many times; all others
    keep their choices and cost nothing."""
    scope = next(iter(weights))
    nodes = []
    for cluster, node in zip(model.clusters, model.problem.nodes, strict=True):
        own = {cluster.scope, *(op.name for op in cluster.members if not op.scope)} & weights.keys()
        times = max((weights[name] for name in own), default=0.0)
        nodes.append(replace(node, cost_s=_times(node.cost_s, times), hide_s=times * node.hide_s))
    inside = [link.kind == "edge" and link.readers[0][0].scope == scope for link in model.links]
    problem = model.problem
    nets = [replace(net, cost_s=_times(net.cost_s, weights[scope] if index < len(inside) and inside[index] else 0.0))
            for index, net in enumerate(problem.nets)]
    return replace(problem, nodes=tuple(nodes), nets=tuple(nets))


def _times(cost_s: np.ndarray, times: float) -> np.ndarray:
    """`times` as much, what cannot be as before."""
    return np.where(np.isinf(cost_s), np.inf, times * np.where(np.isinf(cost_s), 0.0, cost_s))


def _glance(problem: Problem, cutoff_s: float) -> float:
    return ilp.glance(problem, time_limit_s=GLANCE_S, cutoff_s=cutoff_s).bound_s
