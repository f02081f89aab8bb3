"""The cost of each unit of a model (a block, or an operator outside of blocks) in one microbatch on the mesh of one
place, priced as plans are.

The mesh has the axes of expert, context and tensor parallelism. The role of each axis (predict.axes) restricts the
layouts, and a search chooses the fastest of those that are left (predict.layouts). The costs are the seconds of
operators (`Prices`) and those of reshards (`codegen.edges`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import fx

from autopar.bare_plan import bare_plan
from autopar.cluster import Cluster, Mesh
from autopar.codegen.edges import Reshard, edges
from autopar.cost.comm import steps_s
from autopar.errors import PlanError
from autopar.layout import Layout, most_elements
from autopar.pipeline.units import Unit, homes, units
from autopar.planner import Planner
from autopar.problem.build import Decisions
from autopar.problem.graph import Op
from autopar.problem.prices import Prices
from autopar.problem.rerun import Rerun, rerun
from autopar.problem.settings import Settings
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.traffic import tensor_bytes
from autopar.request import Request
from benchmarks.costmodel.predict.axes import PARTS, axes, kept_operators, stacked
from benchmarks.costmodel.predict.layouts import fastest_layouts
from benchmarks.costmodel.predict.owners import line
from benchmarks.costmodel.predict.setup import WHOLE, Setup, Software
from benchmarks.costmodel.predict.sizes import sizes
from passes import ops


@dataclass
class UnitTime:
    """The cost of one microbatch in one instance of a unit on one rank, and the unit's parameters there.

    forward_s, backward_s               kernels
    forward_comm_s, backward_comm_s     collectives of activations
    attention_s, mlp_s, experts_s       of forward_s: the parts of a block that can run again whole (setup.WHOLE)
    kept_s                              of forward_s: operators that are kept where blocks are rerun operator by
                                        operator (axes.kept_operators)
    last_s                              of forward_s: operators that do not run again where recomputation ends once
                                        every tensor is saved (Rerun.stops_before)
    last_kept_s                         of both last_s and kept_s
    weights_s                           of backward_s: gradients of weights
    routed_s, routed_back_s             of forward_s and of backward_s: all-to-alls of tokens to experts and back
    operators                           operators in the forward, views included: calls of the host
    mlp_operators                       those of them in the feed-forward layer
    experts                             layers of experts in the forward
    collectives                         collectives in forward and backward
    parameters, trained                 elements of weights; those of them with gradients
    expert_parameters, expert_trained   of these two: weights of experts
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    attention_s: float = 0.0
    mlp_s: float = 0.0
    experts_s: float = 0.0
    kept_s: float = 0.0
    last_s: float = 0.0
    last_kept_s: float = 0.0
    weights_s: float = 0.0
    routed_s: float = 0.0
    routed_back_s: float = 0.0
    operators: float = 0.0
    mlp_operators: float = 0.0
    experts: float = 0.0
    collectives: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0
    trained: float = 0.0
    expert_trained: float = 0.0

    def scaled(self, by: float) -> UnitTime:
        """Every field times `by`."""
        return UnitTime(*(value * by for value in vars(self).values()))

    def calls(self, software: Software) -> float:
        """Calls of the host, in the forward and in the backward each."""
        if software.captured:
            return 0.0
        issued = self.operators - software.captured_mlp * self.mlp_operators
        return issued + self.collectives + software.expert_calls * self.experts


@dataclass(frozen=True)
class Place:
    """The units of a program in `order`, with the costs of one instance of each by name in `times`. `sent_bytes`: bytes
    that a rank sends to the next stage per microbatch."""

    order: tuple[Unit, ...]
    times: dict[str, UnitTime]
    sent_bytes: float
    mesh: Mesh


@dataclass(frozen=True)
class Decided:
    """The layouts chosen on the mesh of one place."""

    planner: Planner
    mesh: Mesh
    settings: Settings
    decisions: Decisions

    def priced(self, cluster: Cluster) -> Place:
        """The costs with these layouts on a place of `cluster`, on a mesh of the same sizes."""
        mesh = _mesh(cluster, self.mesh.sizes)
        return _Reader(self.planner, mesh, Prices(mesh, cluster.device, self.settings), self.decisions).place()


def price(gm: fx.GraphModule, setup: Setup, cluster: Cluster, precision: str) -> Place:
    """Price one microbatch of `setup` on a place of `cluster`: the graph at `micro_batch` samples per data-parallel
    rank."""
    return decide(gm, setup, cluster, precision).priced(cluster)


def decide(gm: fx.GraphModule, setup: Setup, cluster: Cluster, precision: str) -> Decided:
    """Choose the layouts that the roles of the axes leave open. Raises PlanError where the graph is not for these
    sizes, an axis does not divide what it is to cut, or the device is no faster in the dtype of matmuls."""
    device, matmul = cluster.device, setup.software.matmul
    if matmul and device.peak_flops.get(matmul, 0.0) <= device.flops(precision):
        raise PlanError(
            f"setup: matmuls in {matmul} on {device.name}: its rates are "
            f"{', '.join(f'{rate:.3g} in {dtype}' for dtype, rate in device.peak_flops.items())} FLOP/s; wanted a "
            f"device that is faster in {matmul} than in {precision}"
        )
    used = axes(replace(setup, dp=setup.expert_ways, replicas=1, zero=0))
    ways = tuple(axis.ways for axis in used)
    software = setup.software
    settings = Settings(
        "train",
        "adamw",
        precision,
        fused=software.fused,
        matmul=software.matmul,
        cast_bytes=software.cast_bytes,
        turn_bytes=software.turn_bytes,
        casts_shards=software.casts_shards,
        matmul_share=software.matmul_share,
        # no software has a faster kernel than the fastest one of the device
        attention=min(1.0, software.attention * device.flash2),
        dealt=True,
        tokens_in_parts=software.tokens_in_parts,
        rows_to="nodes" if software.rows_once else "experts",
        in_a_row=software.in_a_row,
    )
    planner = Planner.of(gm, sizes(gm, setup.micro_batch * setup.expert_ways, setup.seq), Request(cluster, settings))
    mesh = _mesh(cluster, ways)
    prices = Prices(mesh, cluster.device, settings)
    return Decided(planner, mesh, settings, fastest_layouts(planner, prices, used))


def _mesh(cluster: Cluster, sizes: tuple[int, ...]) -> Mesh:
    """Axes of `sizes` on the innermost devices of `cluster`, the last one of neighbours; an axis whose size does not
    divide a level of the cluster is on the next level (owners.line)."""
    apart = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    return Mesh(
        tuple(
            replace(line(cluster, inner, size), name=f"a{at}")
            for at, (inner, size) in enumerate(zip(apart, sizes, strict=True))
        )
    )


class _Reader:
    """Adds up, for each unit, the costs of its operators and reshards under `decisions` on one mesh."""

    def __init__(self, planner: Planner, mesh: Mesh, prices: Prices, decisions: Decisions) -> None:
        self.program, self.mesh, self.prices, self.decisions = planner.program, mesh, prices, decisions
        self.forward = ForwardPrices(mesh, prices.device, prices.settings)
        self.plan = bare_plan(planner, mesh, decisions, "given")
        self.order = units(self.program)
        self.home = homes(self.program, self.order)
        self.count = {run.scope: run.count for run in self.program.runs.values()}
        self.times = {unit.name: UnitTime() for unit in self.order}
        self.reruns: dict[str, Rerun] = {}
        self.kept = kept_operators(self.program)
        self.parts = {part: PARTS[part](self.program) for part in WHOLE}

    def place(self) -> Place:
        """The costs of all units, per instance."""
        for op in self.program.ops.values():
            self._op(op)
        for reshard in edges(self.program, self.plan).reshards:
            self._reshard(reshard)
        times = {name: time.scaled(1 / self.count.get(name, 1)) for name, time in self.times.items()}
        return Place(tuple(self.order), times, self._sent_bytes(), self.mesh)

    def _op(self, op: Op) -> None:
        """Add one operator or parameter to its unit."""
        here, options = self.times[self.home[op.name]], self.decisions[op.name]
        if op.role == "param":
            self._parameter(op, here)
            return
        if op.role != "op":
            return
        both, forward = self.prices.op_s(op, options), self.forward.op_s(op, options)
        here.forward_s += forward
        here.backward_s += both - forward
        ahead_s, back_s = (op.count * sum(wait.seconds for wait in way) for way in self.prices.waits(op, options))
        here.weights_s += op.weights_share * (both - forward - back_s)
        here.routed_s += ahead_s * (op.target is ops.experts)
        here.routed_back_s += back_s * (op.target is ops.experts)
        here.operators += op.count
        here.mlp_operators += op.count * self.parts["mlp"](op)
        here.experts += op.count * (op.target is ops.experts)
        for part, inside in self.parts.items():
            if inside(op):
                setattr(here, f"{part}_s", getattr(here, f"{part}_s") + forward)
        last = op.scope != "" and self._reruns(op.scope).stops_before(op.name)
        here.kept_s += forward * (op.name in self.kept)
        here.last_s += forward * last
        here.last_kept_s += forward * (last and op.name in self.kept)

    def _reruns(self, scope: str) -> Rerun:
        if scope not in self.reruns:
            self.reruns[scope] = rerun(self.program, scope, ())
        return self.reruns[scope]

    def _parameter(self, op: Op, here: UnitTime) -> None:
        layout: Layout = tuple(option.outs[0].value for option in self.decisions[op.name])
        held = float(most_elements(op.call.outs[0].sizes, layout, self.mesh.sizes) * op.count)
        here.parameters += held
        here.expert_parameters += held if stacked(op) else 0.0
        if op.call.outs[0].grad:
            here.trained += held
            here.expert_trained += held if stacked(op) else 0.0

    def _reshard(self, reshard: Reshard) -> None:
        """Add one reshard to the unit in which it runs: that of its scope, else of its first reader."""
        producer = self.program.ops[reshard.ref[0]]
        at = reshard.scope or (self.home[reshard.readers[0]] if reshard.readers else self.home[producer.name])
        here, size = (
            self.times[at if at in self.times else self.home[producer.name]],
            self.program.bytes_of(reshard.ref),
        )
        forward, backward = reshard.forward(self.mesh.sizes), reshard.backward(self.mesh.sizes)
        if reshard.role == "sync":  # once per step, with all other gradients
            return
        here.forward_comm_s += steps_s(forward, size, self.mesh) * reshard.count
        here.backward_comm_s += steps_s(backward, size, self.mesh) * reshard.count
        here.collectives += (len(forward) + len(backward)) * reshard.count

    def _sent_bytes(self) -> float:
        """Bytes of the values on one rank that go from block to block, which are what a stage sends to the next."""
        return sum(
            tensor_bytes(self.program.ops[ref[0]].call.outs[ref[1]]) * self._local_share(ref[0], ref[1])
            for run in self.program.runs.values()
            for ref in run.carried
        )

    def _local_share(self, name: str, index: int) -> float:
        """The share of output number `index` of an operator that one rank has."""
        value = tuple(option.outs[index].value for option in self.decisions[name])
        return self.prices.local_bytes(1.0, value)
