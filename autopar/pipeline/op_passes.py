"""The operators' part of the passes of a microbatch (pipeline.passes): compute, and the collectives inside of
operators."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.comm import link_shares
from autopar.pipeline.clock import Timeline
from autopar.pipeline.stops import AGAIN, AHEAD, BACK, LAST
from autopar.pipeline.units import homes, units
from autopar.pipeline.work import BACKWARD, BOTH, FORWARD, INPUTS, WEIGHTS, Did
from autopar.problem.build import Model
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op, Program
from autopar.problem.hiding import Load
from autopar.problem.op_algorithms import Wait
from autopar.problem.prices import Prices
from autopar.problem.step_shares import ForwardPrices
from autopar.rules.language import Option


class OpPasses:
    """What the operators of all pieces of `program` do in each pass, under the solution `choice` of `model`; `forward`
    and `apart` as in Passes.

    `did` has it by piece; `stops` in program order, per block.
    """

    def __init__(
        self, program: Program, model: Model, choice: Sequence[int], forward: ForwardPrices, *, apart: bool
    ) -> None:
        self.program, self.model, self.choice, self.forward, self.apart = program, model, choice, forward, apart
        self.prices: Prices = model.prices
        self.line = Timeline(program)
        self.stops = self.line.stops
        self.pieces = units(program)
        self.home = homes(program, self.pieces)
        self.did: dict[str, Did] = {name: Did() for name in dict.fromkeys(u.name for u in self.pieces)}
        for index, cluster in enumerate(model.clusters):
            self._add_node(index, cluster)

    @property
    def by_block(self) -> bool:
        """Whether stages are made of blocks."""
        return self.apart and bool(self.program.runs)

    def _add_node(self, index: int, cluster: Cluster) -> None:
        """Add the operators of a node: forward, backward, the collectives inside of them, and what of its cost in the
        Problem is left, which runs again."""
        node, c, combo = (
            self.model.problem.nodes[index],
            self.choice[index],
            self.model.choices[index][self.choice[index]],
        )
        left_s, ahead_s, inside = float(node.cost_s[c]), 0.0, list[tuple[Load, float]]()
        for member, op in enumerate(cluster.members):
            options: tuple[Option, ...] = tuple([joint.options[member] for joint in combo])
            if op.role == "param":  # the optimizer's step belongs to no pass
                left_s -= self.model.update_s(index, c)
                continue
            if op.free and not any(option.run for option in options):
                continue
            forward_s, both_s = self.forward.op_s(op, options), self.prices.op_s(op, options)
            left_s, ahead_s = left_s - both_s, ahead_s + forward_s
            if not any(option.run for option in options):
                self._add_compute(self.home[op.name], forward_s, both_s - forward_s, op.weights_share)
                self._record_compute(op, forward_s, both_s - forward_s)
                continue
            waits = self.prices.waits(op, options)
            ahead, back = ([self._load(wait) for wait in way] for way in waits)
            self._record_waits(op, waits)
            alone_s, alone_back_s = forward_s - op.count * sum_s(ahead), both_s - forward_s - op.count * sum_s(back)
            self._add_compute(self.home[op.name], alone_s, alone_back_s, op.weights_share)
            self._record_compute(op, alone_s, alone_back_s)
            self._add_waits(self.home[op.name], ahead, back, op.weights_share, op.count)
            inside += [(load, op.count) for load in ahead]
        self._add_rerun(cluster.root, max(0.0, left_s), ahead_s, inside)

    def _record_compute(self, op: Op, forward_s: float, back_s: float) -> None:
        """Record the compute of an operator in program order, per block."""
        for seconds, way in ((forward_s, AHEAD), (back_s, BACK)):
            self.stops.at(op, way).compute_s = seconds / self.line.blocks(op.scope)

    def _record_waits(self, op: Op, waits: Sequence[Sequence[Wait]]) -> None:
        """Record the collectives inside an operator in program order."""
        for each, way in zip(waits, (AHEAD, BACK), strict=True):
            stop = self.stops.at(op, way)
            stop.waits += [(LAST, self._load(wait)) for wait in each if not wait.last]
            stop.behind += [self._load(wait) for wait in each if wait.last]

    def _load(self, wait: Wait) -> Load:
        """A collective inside an operator as a Load."""
        return Load(
            wait.axis, wait.seconds, link_shares(wait.kind, wait.nbytes, self.prices.mesh.axes[wait.axis]), wait.kind
        )

    def _add_waits(self, name: str, ahead: Sequence[Load], back: Sequence[Load], weights: float, count: float) -> None:
        """Add collectives inside an operator that compute waits for. The share `weights` of those of a backward belongs
        to the part for weights."""
        passes = self.did[name].passes
        passes[FORWARD].wait(ahead, count)
        for way, share in _backward(weights):
            passes[way].wait(back, count * share)

    def _add_rerun(self, op: Op, again_s: float, ahead_s: float, inside: Sequence[tuple[Load, float]]) -> None:
        """Add `again_s` of a node whose forward takes `ahead_s`, and whose first operator is `op`, that run again in
        the backward, and the same share of the collectives inside of it."""
        name, share = self.home[op.name], min(1.0, again_s / ahead_s) if ahead_s > 0 else 0.0
        compute_s = again_s - share * sum(count * load.seconds for load, count in inside)
        self._add_compute(name, 0.0, compute_s, 0.0)
        for load, count in inside if share > 0 else ():
            self._add_waits(name, (), [load], 0.0, share * count)
        if op.scope and share > 0:
            stop, blocks = self.stops.at(op, AGAIN), self.line.blocks(op.scope)
            stop.compute_s += compute_s / blocks
            stop.waits += [(LAST, load.times(share * count / blocks)) for load, count in inside]

    def _add_compute(self, name: str, forward_s: float, back_s: float, weights: float) -> None:
        """Add compute of a piece. The share `weights` of its backward is for the gradients of weights."""
        passes = self.did[name].passes
        passes[FORWARD].compute_s += forward_s
        for way, share in _backward(weights):
            passes[way].compute_s += share * back_s


def _backward(weights: float) -> tuple[tuple[int, float], ...]:
    """The passes of a backward, each with its share of it where `weights` is the share for the gradients of weights."""
    return (BACKWARD, 1.0), (INPUTS, 1 - weights), (WEIGHTS, weights), (BOTH, 1.0)


def sum_s(loads: Sequence[Load]) -> float:
    """Seconds of all `loads`, one after the other."""
    return sum(load.seconds for load in loads)
