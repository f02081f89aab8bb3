"""Seconds and bytes of the parts of a Problem on one mesh: operators on shards, reshards, parameters at rest. Called by
problem.build for Problems, and by whatever prices a plan (pipeline, simulate, explain).

operator   forward + backward roofline time of its local FLOPs and bytes on the slowest rank, times how often it
           runs, and the exposed part of its own collectives (rules.algorithms)
reshard    steps(value -> value) forward and steps(gradient -> gradient) backward (layout.steps: what the runtime
           runs)
update     the optimizer's pass over the part of a parameter that the rank holds
weight     a reshard whose gather is repeated where the backward needs it (the gathered copy is not kept); once per
           step the gather of its leaf, and the reshard of the leaf's gradient to the layout at rest
           (`problem.at_rest`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.buckets import BUCKET_BYTES
from autopar.cluster import Device, Mesh
from autopar.cost.comm import collective_s
from autopar.cost.memory import ParameterBytes, itemsize, parameter_bytes, rests_in, scales_loss
from autopar.layout import Layout, fraction, most_elements
from autopar.optimizers import OPTIMIZERS
from autopar.problem.at_rest import Resting
from autopar.problem.graph import Op
from autopar.problem.kernels import Kernels
from autopar.problem.layout_pairs import Between, routes_on
from autopar.problem.op_algorithms import Wait, keeping, sites, waits
from autopar.problem.operand_copies import copy_of, tensor_of
from autopar.problem.pairs import LayoutPair
from autopar.problem.settings import Settings
from autopar.rules.experts import INSIDE
from autopar.rules.language import Option
from autopar.rules.site import InnerCollective, Site
from autopar.rules.tiles import tile_bytes

OVERLAP = 0.8
"""In the linear form of the Problem: the share of compute that can overlap collectives, on devices where any can."""


@dataclass(frozen=True, slots=True)
class MovedWeight:
    """A weight of `nbytes`, with a gradient of `grad_bytes`. `last_share` of its gradients come from the block whose
    backward is last; `ahead`: gathers can begin before its use."""

    nbytes: float
    grad_bytes: float
    last_share: float
    ahead: bool


class Prices:
    """Prices of one program on one mesh of one cluster.

    `kernels`: prices of its operators, to share with other meshes (None: new ones). `bucket_bytes`
    (Program.bucket_bytes): the size of buckets of gradients and of leaves (0: each weight alone).
    """

    late = False
    """Whether these are prices of what happens once per step, with nothing kept for a backward."""

    def __init__(
        self,
        mesh: Mesh,
        device: Device,
        settings: Settings,
        kernels: Kernels | None = None,
        *,
        bucket_bytes: float = 0.0,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.mesh, self.device, self.settings, self.kernels = (
            mesh,
            device,
            settings,
            kernels or Kernels(device, settings),
        )
        self.sizes = tuple(axis.size for axis in mesh.axes)
        self.routes = routes_on(mesh)
        self._shares: dict[Layout, float] = {}
        self._op: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}

    @cached_property
    def overlap(self) -> float:
        """The share of compute that can overlap collectives: 0 where these take all compute units."""
        return OVERLAP if self.contention < 1.0 else 0.0

    @cached_property
    def contention(self) -> float:
        """Seconds that an overlapped collective adds to the compute beside it, per second."""
        return self.device.contended

    def op_s(self, op: Op, options: tuple[Option, ...]) -> float:
        """Seconds per step of one Op under one option per axis, collectives of its own algorithm included."""
        return self.work_s(op, options)[0]

    def work_s(self, op: Op, options: tuple[Option, ...]) -> tuple[float, float]:
        """`op_s`, and the seconds of it that can overlap collectives of other operators: compute that does not overlap
        collectives of its own algorithm."""
        key = (op.name, tuple([o.factor for o in options]))
        found = self._op.get(key)
        if found is None:
            seconds, room = self._op_s(op, options)
            found = self._op[key] = seconds * op.count, room * op.count
        return found

    def _op_s(self, op: Op, options: tuple[Option, ...]) -> tuple[float, float]:
        """Seconds of one run of `op`, and how many of them can overlap collectives of other operators."""
        if op.role != "op":
            return 0.0, 0.0
        seconds, back = self.kernels.seconds(op, options, self.sizes)
        if not any(option.run for option in options):
            return seconds + back, (seconds + back) * self.overlap
        used = sites(op, options, self.sizes, self.settings.precision)
        shown, taken = self._inner_s([(site, algorithm.forward) for algorithm, site in used], seconds)
        if not (self.settings.training and op.graded):
            return seconds + shown, seconds * self.overlap - taken
        more, under = self._inner_s([(site, algorithm.backward) for algorithm, site in used], back)
        return seconds + back + shown + more, (seconds + back) * self.overlap - taken - under

    def waits(self, op: Op, options: tuple[Option, ...]) -> tuple[tuple[Wait, ...], tuple[Wait, ...]]:
        """The collectives inside one run of `op` that it waits for, forward and backward. They are part of `op_s`."""
        used = sites(op, options, self.sizes, self.settings.precision)
        back = [(site, algorithm.backward) for algorithm, site in used] if self.settings.training and op.graded else []
        ahead = [(site, algorithm.forward) for algorithm, site in used]
        return waits(ahead, self.mesh, self.settings), waits(back, self.mesh, self.settings)

    def _inner_s(self, used: Sequence[tuple[Site, Sequence[InnerCollective]]], work_s: float) -> tuple[float, float]:
        """Exposed seconds of the collectives inside an operator that works `work_s`, and the seconds of that work that
        overlap the others."""
        shown = sum(wait.seconds for wait in waits(used, self.mesh, self.settings))
        hidden = room = 0.0
        for site, inner in used:
            for each in inner:
                times = each.times(site) if each.hidden else 0
                if times:
                    hidden += times * collective_s(each.kind, each.nbytes(site), self.mesh.axes[site.axis])
                    room = max(room, self.overlap * work_s * times / (times + 1))
        taken = min(hidden, room)
        return shown + hidden - taken + self.contention * taken, taken

    def table_s(
        self,
        rows: Sequence[LayoutPair],
        columns: Sequence[LayoutPair],
        size_bytes: float,
        again: Sequence[bool] = (),
        *,
        weight: bool = False,
        grad_bytes: float | None = None,
    ) -> np.ndarray:
        """Seconds of the reshard from each row to each column, forward and backward, of a tensor of `size_bytes`
        (`weight`: of a parameter) with a gradient of `grad_bytes` (None: as many).

        `again` says for which columns the gathered copy is not kept but gathered once more in the backward (weights
        that the backward needs).
        """
        here = self.routes.between(rows, columns)
        seconds = self.routes.seconds(here.forward, size_bytes)
        if any(again):
            seconds = seconds * self.again(rows, columns, again)
        if not here.graded.any():
            return seconds
        grad_bytes = grad_bytes or size_bytes
        back = (
            self._weight_back_s(here, grad_bytes, size_bytes) if weight else self.routes.seconds(here.back, grad_bytes)
        )
        return seconds + np.where(here.graded, back, 0.0)

    def shown(
        self,
        rows: Sequence[LayoutPair],
        columns: Sequence[LayoutPair],
        weight: MovedWeight,
        seconds: np.ndarray,
        times: np.ndarray,
    ) -> np.ndarray:
        """[rows, columns]: of the `seconds` of a weight's reshard the share that counts as exposed, in the linear form
        of the Problem: what compute waits for, and of the rest `contention`. It is gathered `times` times.

        Where gathers can begin ahead of their use, chains that begin with a gather, and the scatters of their
        gradients, run in the background (`hiding.split`), and so do sums (runtime.gradsync), and of leaves that are
        gathered once per step (runtime.leaves). Of the gradients of the block whose backward is last, compute waits for
        all but the first collective.
        """
        here = self.routes.between(rows, columns)
        gathers = self.routes.gathers(here.forward) & weight.ahead
        waits = times * np.where(
            gathers,
            self.routes.waited_s(here.forward, weight.nbytes),
            self.routes.seconds(here.forward, weight.nbytes),
        )
        if here.graded.any():
            # a sum after a scatter begins one block later for each collective of the scatter
            late = np.minimum(1.0, weight.last_share * self.routes.collectives(here.read))
            back = np.where(
                gathers,
                self.routes.waited_s(here.read, weight.grad_bytes, later=weight.last_share),
                self.routes.seconds(here.read, weight.grad_bytes),
            )
            back = back + self._sums_wait_s(here, weight, np.where(gathers, late, 0.0))
            waits = waits + np.where(here.graded, back, 0.0)
        share = np.divide(waits, seconds, out=np.zeros_like(waits), where=(seconds > 0) & np.isfinite(seconds))
        return np.asarray(self.contention + (1.0 - self.contention) * np.clip(share, 0.0, 1.0))

    def _sums_wait_s(self, here: Between, weight: MovedWeight, last: np.ndarray) -> np.ndarray:
        """[rows, columns]: seconds of sums of gradients that compute waits for."""
        bucket_bytes = self.grad_bucket_bytes(weight.nbytes, weight.grad_bytes)
        hidden_s = self.routes.waited_s(here.summed, weight.grad_bytes, bucket_bytes)
        return (1.0 - last) * hidden_s + last * self.routes.seconds(here.summed, weight.grad_bytes, bucket_bytes)

    def again(self, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair], twice: Sequence[bool]) -> np.ndarray:
        """[rows, columns]: how often a weight is gathered whose copy is dropped for the columns `twice`."""
        return np.where(self.routes.between(rows, columns).regathers & np.array(twice), 2.0, 1.0)

    def _weight_back_s(self, here: Between, grad_bytes: float, leaf_bytes: float) -> np.ndarray:
        """[rows, columns]: seconds of the reshard of the gradient of a weight of `leaf_bytes`; any value where there is
        no gradient.

        The gradient goes to the layout of the leaf, and from there in buckets to that at rest. With that sum comes the
        gather of leaves that are made once per step, because all readers share both.
        """
        return (
            self.routes.seconds(here.read, grad_bytes)
            + self.summed_s(here, grad_bytes, leaf_bytes)
            + self.routes.seconds(here.leaf, leaf_bytes, self.bucket_bytes)
        )

    def summed_s(self, here: Between, size_bytes: float, leaf_bytes: float) -> np.ndarray:
        """[rows, columns]: seconds of bringing gradients of `size_bytes` from leaves of `leaf_bytes` to where these
        rest, in buckets."""
        return self.routes.seconds(here.summed, size_bytes, self.grad_bucket_bytes(leaf_bytes, size_bytes))

    def grad_bucket_bytes(self, size_bytes: float, grad_bytes: float, together_bytes: float = math.inf) -> float:
        """Bytes of the gradients that go in one bucket with those of a weight of `size_bytes`, whose gradient has
        `grad_bytes`, where weights of `together_bytes` are summed in all; 0 for a weight without elements. A bucket is
        full at BUCKET_BYTES of gradients, in the dtype in which they are summed (runtime.gradsync)."""
        return (
            min(BUCKET_BYTES, min(self.bucket_bytes, together_bytes) * grad_bytes / size_bytes) if size_bytes else 0.0
        )

    def made_bytes(
        self, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair], size_bytes: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(bool, bytes) [rows, columns]: whether the result of each reshard has memory of its own, and how many bytes
        per device that is."""
        held = self.routes.result_share(self.routes.between(rows, columns).forward)
        fresh = ~np.isnan(held)
        return fresh, np.where(fresh, size_bytes * held, 0.0)

    def halfway_bytes(self, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair], size_bytes: float) -> np.ndarray:
        """[rows, columns]: bytes per device of the intermediate results where several collectives, one after the other,
        gather a weight."""
        here = self.routes.between(rows, columns)
        return np.where(
            self.routes.gathers(here.forward), size_bytes * self.routes.intermediate_share(here.forward), 0.0
        )

    def rest_bytes(self, op: Op, options: Sequence[Option]) -> float:
        """Bytes, on the rank that holds most, of a value at rest (parameter, buffer, constant, input), all its
        instances. A parameter counts with its gradient, its optimizer state, and its leaf where that is a tensor of its
        own."""
        lies = Resting.of(options)
        if op.role != "param":
            return float(self._elements(op, lies.leaf) * op.out_dtypes[0].itemsize * op.count)
        return self._held(op, lies).total

    def _elements(self, op: Op, layout: Layout) -> int:
        """Elements of one instance on the rank that holds most."""
        return most_elements(op.call.outs[0].sizes, layout, self.sizes)

    def extra_bytes(self, op: Op, options: tuple[Option, ...]) -> float:
        """Bytes per device that the backward of one Op keeps beside tensors of the graph (masks, statistics, copies of
        operands), all its instances."""
        if self.settings.training and (instead := keeping(op, options, self.sizes)) is not None:
            own = instead.own_bytes
            for index in (*instead.given, *instead.copied):
                own += 0.0 if index in op.saves else self.local_bytes(*tensor_of(op, index, options))
            return own * op.count
        own = 0.0
        if op.target in INSIDE and self.settings.training and op.graded:
            own = INSIDE[op.target].kept_bytes(Site(op.call.ins, options, self.sizes, call=op.call))
        if self.settings.training and op.graded:
            own += sum(
                algorithm.inside.kept_bytes(site)
                for algorithm, site in sites(op, options, self.sizes)
                if algorithm.inside
            )
        # what a sum of terms keeps lies as they do
        layout = tuple(
            (option.outs[0] if op.call.outs[0].shape or not op.extra_bytes else option.ins[0]).value
            for option in options
        )
        for index in op.copies:
            own += self.local_bytes(*copy_of(op, index, options))
        return (own + self.local_bytes(op.extra_bytes, layout)) * op.count

    def passing_bytes(self, op: Op, options: tuple[Option, ...]) -> float:
        """Bytes per device of the tiles in which algorithms of one Op gather weights. One tile per weight is counted,
        as one copy of each gathered weight is; at their peak the algorithms have more."""
        return sum(tile_bytes(site) for algorithm, site in sites(op, options, self.sizes) if algorithm.gathers)

    def update_s(self, op: Op, options: Sequence[Option]) -> float:
        """Seconds of the optimizer's step on one parameter, all its instances: one pass that reads weight, gradient and
        state and writes all but the gradient, and what several kernels read and write again. No launch floor but
        `update_s`: torch's fused and foreach optimizers run over all parameters."""
        # what rests, whatever else of the gradient is there until the end of a step (StepPrices)
        held = (
            Prices._held(self, op, Resting.of(options))
            if op.role == "param" and self.settings.training and op.call.outs[0].grad
            else None
        )
        if held is None:
            return 0.0
        if self.settings.offload == "parameters":
            return self._host_update_s(op, held.gradients)
        rests, state = held.master or held.weights, held.gradients * OPTIMIZERS[self.settings.optimizer].state
        moved_s = self._pass_bytes(op, rests, held.gradients) / (
            self.device.memory_bandwidth_bytes_s * self.device.achievable_bandwidth * self.device.update
        )
        # there and back, not hidden
        brought_s = 2 * state / self.device.host_link_bytes_s if self.settings.offload else 0.0
        return moved_s + brought_s + self.device.update_s * op.count

    def adding_s(self, op: Op, options: Sequence[Option]) -> float:
        """Seconds of adding the gradients of one parameter after a microbatch, all its instances, to those of earlier
        microbatches. They are cast to the dtype of the sum where that is another one, then two tensors are read and one
        is written. They have the layout of the leaf, or, where each microbatch scatters them, that at rest."""
        if op.role != "param" or not (self.settings.training and op.call.outs[0].grad):
            return 0.0
        lies = Resting.of(options)
        own, kept = op.out_dtypes[0].itemsize, itemsize(self._rest_dtype(op))
        elements = self._elements(op, lies.rest if lies.each else lies.leaf)
        return op.count * (
            self.device.launch_s + self.device.memory_s(elements * (3 * kept + (own + kept if own != kept else 0)))
        )

    def _host_update_s(self, op: Op, rests: float) -> float:
        """Seconds of an update on the host: gradients of `rests` bytes are copied there, the optimizer's pass runs, and
        the weights are cast to the dtype of the computation and copied back."""
        back = rests * op.out_dtypes[0].itemsize / itemsize(self._rest_dtype(op))
        passed_s = self._pass_bytes(op, rests, rests) / self.device.host_bandwidth_bytes_s
        return passed_s + (rests + back) / self.device.host_link_bytes_s + self.device.update_s * op.count

    def _pass_bytes(self, op: Op, rests: float, gradients: float) -> float:
        """Bytes that the step reads and writes of a parameter that rests in `rests` bytes; before it, where the loss
        has a scale, gradients are read and written."""
        kind = OPTIMIZERS[self.settings.optimizer]
        graded = (3 if scales_loss(self.settings.precision) else 1) * gradients
        return (2 + kind.again) * rests + 2 * kind.state * gradients + graded + self._cast_bytes(op, rests)

    def _cast_bytes(self, op: Op, rests: float) -> float:
        """Bytes read and written when what rests is cast to the dtype of the computation."""
        own, rest = op.out_dtypes[0].itemsize, itemsize(self._rest_dtype(op))
        return rests * (1 + own / rest) if own != rest else 0.0

    def _rest_dtype(self, op: Op) -> str:
        return rests_in(str(op.out_dtypes[0]), self.settings.precision)

    def gradient_bytes(self, op: Op, size_bytes: float) -> float:
        """Bytes of the gradient of a weight of `size_bytes`, which is summed in the dtype that the weight rests in."""
        own = op.out_dtypes[0].itemsize
        return size_bytes * itemsize(self._rest_dtype(op)) / own if op.call.outs[0].grad else size_bytes

    def _held(self, op: Op, lies: Resting) -> ParameterBytes:
        numel, dtype = self._elements(op, lies.rest) * op.count, str(op.out_dtypes[0]).removeprefix("torch.")
        return parameter_bytes(
            numel,
            dtype,
            precision=self.settings.precision,
            optimizer=self.settings.optimizer,
            training=self.settings.training and op.call.outs[0].grad,
            leaf=self._elements(op, lies.leaf) * op.count if lies.gathered else None,
            offload=self.settings.offload,
        )

    def local_bytes(self, size_bytes: float, layout: Layout) -> float:
        """Bytes that one rank has of a tensor of `size_bytes`."""
        return size_bytes * self._share(layout)

    def _share(self, layout: Layout) -> float:
        share = self._shares.get(layout)
        if share is None:
            share = self._shares[layout] = fraction(layout, self.sizes)
        return share
