"""Seconds and bytes of the parts of a problem: operators on shards, reshards, parameters at rest.

    operator   forward + backward roofline time of its local FLOPs and bytes on the slowest rank, times how often it runs, and what
               of its own collectives (rules.algorithms) that does not hide
    reshard    steps(value -> value) forward and steps(gradient -> gradient) backward (layout.steps: what the runtime runs)
    update     the optimizer's pass over what the rank holds of a parameter
    weight     a reshard whose gather is repeated where the backward needs it (the gathered copy is not kept); once per step the way
               from rest to leaf, and that of the leaf's gradient to where it is summed (`problem.resting`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch

from autopar.cluster import Device, Mesh
from autopar.cost.comm import collective_s, copy_s
from autopar.cost.compute import ALIGNED_BYTES, BACKWARD, UNALIGNED, Shape, matmul_efficiency, op_s
from autopar.cost.memory import ParameterBytes, itemsize, parameter_bytes, rests_in
from autopar.layout import NO_GRAD, Layout, fraction, is_placed, most_elements, show
from autopar.problem.graph import Op
from autopar.problem.inner import sites
from autopar.problem.paths import Paths
from autopar.problem.resting import Resting, gathered_axes
from autopar.rules.experts import INSIDE
from autopar.rules.language import Option, Use
from autopar.rules.site import Inner, Site

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

OVERLAP = 0.8
"""The share of compute under which collectives can hide on an accelerator."""

CONTENTION = 20 / 132
"""Seconds that a hidden collective adds to the compute over it, per second: its kernels take multiprocessors, 20 of an H800's 132 in
DeepSeek-V3's training (https://arxiv.org/abs/2412.19437, section 3.2.2)."""


class Pair(NamedTuple):
    """Layouts of a value and of its gradient; of a weight also whether its gradient is scattered after every microbatch."""

    value: Layout
    grad: Layout
    each: bool = False

    def __str__(self) -> str:
        return f"{show(self.value)}|{show(self.grad)}"


@dataclass(frozen=True)
class Settings:
    """What is trained and how: `mode` train or inference, the optimizer's name, the compute precision.

    `fused`: chains of pointwise operators run as one kernel. `matmul`: the dtype of matmuls with weights where it is another one
    (float8), their operands quantised on the way. `attention`: the rate of fused attention, as a multiple of the device's.
    `dealt`: rows of the sequence come in the order in which rings balance, so that attention has none to put in order.
    """

    mode: str = "train"
    optimizer: str = "adamw"
    precision: str = "float32"
    fused: bool = False
    matmul: str = ""
    attention: float = 1.0
    dealt: bool = False

    @property
    def training(self) -> bool:
        return self.mode == "train"


def pair(uses: tuple[Use, ...]) -> Pair:
    """The layouts of value and gradient, from one use per axis."""
    return Pair(tuple(u.value for u in uses), tuple(u.grad for u in uses))


@cache
def synced(row: Pair, column: Pair) -> Layout:
    """The gradient of a weight's leaf, before it is summed or scattered: partial where the weight is gathered once per step, and
    where it rests whole and the reader leaves a part (codegen.edges says the same of a plan)."""
    if NO_GRAD in column.grad or NO_GRAD in row.grad:
        return row.grad
    once = gathered_axes(row.value, row.grad)
    return tuple("P" if axis in once or (rest == value == "R" and grad == "P") else own
                 for axis, (rest, value, grad, own) in enumerate(zip(row.value, column.value, column.grad, row.grad, strict=True)))


class Prices:
    """Prices on one mesh of one cluster."""

    def __init__(self, mesh: Mesh, device: Device, settings: Settings) -> None:
        self.mesh, self.device, self.settings = mesh, device, settings
        self.sizes = tuple(axis.size for axis in mesh.axes)
        self.paths = Paths(mesh)
        self._shares: dict[Layout, float] = {}
        self._op: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}

    @cached_property
    def overlap(self) -> float:
        """The share of compute under which collectives can hide: none on a CPU, whose cores do both."""
        return 0.0 if self.device.kind == "cpu" else OVERLAP

    @cached_property
    def contention(self) -> float:
        """Seconds that a hidden collective adds to the compute over it, per second."""
        return CONTENTION

    def op_s(self, op: Op, options: tuple[Option, ...]) -> float:
        """Seconds per step of one Op under one option per axis, collectives of its own algorithm included."""
        return self._work(op, options)[0] * op.count

    def hide_s(self, op: Op, options: tuple[Option, ...]) -> float:
        """Seconds per step under which collectives of others can hide: not those under which its own algorithm's do."""
        seconds, taken = self._work(op, options)
        return (seconds * self.overlap - taken) * op.count

    def _work(self, op: Op, options: tuple[Option, ...]) -> tuple[float, float]:
        key = (op.name, tuple(o.factor for o in options))
        if key not in self._op:
            self._op[key] = self._op_s(op, options)
        return self._op[key]

    def _op_s(self, op: Op, options: tuple[Option, ...]) -> tuple[float, float]:
        """Seconds of one run of `op`, and how many of them hide its own collectives."""
        if op.role != "op":
            return 0.0, 0.0
        used = sites(op, options, self.sizes)
        share = math.prod(1.0 / n for o, n in zip(options, self.sizes, strict=True) if o.split)
        share *= max((algorithm.pace(site) for algorithm, site in used), default=1.0)
        local = self._moved(op, options)
        inside = sum(algorithm.inside.moved_bytes(site) for algorithm, site in used if algorithm.inside)
        if op.target in INSIDE:
            inside += INSIDE[op.target].moved_bytes(Site(op.call.ins, options, self.sizes))
        forward, backward = (op.fused_bytes, op.fused_backward_bytes) if self.settings.fused else (op.bytes, op.backward_bytes)
        matmul = self._matmul(op, options, share)
        seconds = self._kernel_s(op, op.flops * share, forward * local + inside, matmul, 0, local)
        shown, taken = self._inner_s([(site, algorithm.forward) for algorithm, site in used], seconds)
        if self.settings.training and any(t.grad for t in op.call.outs):
            back = self._kernel_s(op, op.backward_flops * share, backward * local + 2 * inside, matmul, 1, local)
            more, under = self._inner_s([(site, algorithm.backward) for algorithm, site in used], back)
            return seconds + back + shown + more, taken + under
        return seconds + shown, taken

    def _kernel_s(self, op: Op, flops: float, nbytes: float, matmul: Shape | None, direction: int, local: float) -> float:
        """Seconds of the kernels of one direction (0 forward, 1 backward) of an Op."""
        dtype = self.settings.matmul if self.settings.matmul and any(op.weight) and matmul else op.dtype
        share = self._share_of_peak(op, flops, dtype, matmul, direction)
        seconds = op_s(flops, nbytes, dtype, self.device, matmul=matmul, share=share)
        if dtype != op.dtype:  # what comes in (a gradient in the backward) is read, and written once by rows and once by columns
            seconds += copy_s(2.0 * local * math.prod((op.call.ins[0], op.call.outs[0])[direction].sizes), self.device)
        follows = self.settings.fused and not op.leads
        return max(0.0, seconds - self.device.launch_s) if follows and seconds else seconds

    def _share_of_peak(self, op: Op, flops: float, dtype: str, matmul: Shape | None, direction: int) -> float | None:
        """The share of the peak of `dtype` that the matmuls of an Op reach; None where it has none."""
        if matmul is None:
            return None
        device = self.device
        if op.target is ATTENTION and device.attention is not None:
            keys = op.call.ins[1].sizes[-2]
            return min(1.0, self.settings.attention * device.attention[direction]) * keys / (keys + 4 * device.tile)
        m, n, k = matmul
        shapes = [(m, n, k)] if direction == 0 else [(m, k, n), (n, k, m)]  # gradients of rows, and of the weight
        found = [matmul_efficiency(flops / len(shapes), shape, device) for shape in shapes]
        turned = BACKWARD if direction and any(op.weight) else 1.0
        aligned = 1.0 if all(size * itemsize(op.dtype) % ALIGNED_BYTES == 0 for size in (n, k)) else UNALIGNED
        return len(found) / sum(1 / share for share in found) * aligned * turned * device.best_share(dtype) / device.achievable * device.sustained

    def _inner_s(self, used: Sequence[tuple[Site, Sequence[Inner]]], work_s: float) -> tuple[float, float]:
        """Exposed seconds of collectives inside an operator that works `work_s`, and the seconds of that work that hide the others."""
        shown = hidden = room = 0.0
        for site, inner in used:
            for each in inner:
                times = each.times(site)
                if each.reorders and self.settings.dealt:
                    continue
                seconds = times * collective_s(each.kind, each.nbytes(site), self.mesh.axes[site.axis]) if times else 0.0
                if each.hidden:
                    hidden += seconds
                    room = max(room, self.overlap * work_s * times / (times + 1))
                else:
                    shown += seconds
        taken = min(hidden, room)
        return shown + hidden - taken + self.contention * taken, taken

    def _moved(self, op: Op, options: tuple[Option, ...]) -> float:
        """Local share of the bytes of all tensors of `op`."""
        whole = local = 0.0
        for index, tensor in enumerate(op.tensors):
            layout = tuple((*o.ins, *o.outs)[index].value for o in options)
            numel = math.prod(tensor.sizes)
            whole += numel
            local += numel * self._share(layout)
        return local / whole if whole else 1.0

    def _matmul(self, op: Op, options: tuple[Option, ...], share: float) -> tuple[int, int, int] | None:
        """Local (m, n, k) of a contraction with one output, from its FLOPs 2 m n k and the output's last dim."""
        if op.flops <= 0 or not op.call.outs[0].sizes or sum(len(t.sizes) > 1 for t in op.call.ins) < 2:
            return None
        layout = tuple(o.outs[0].value for o in options)
        sizes = op.call.outs[0].sizes
        numel = math.prod(sizes) * self._share(layout)
        last = 1 if "conv" in getattr(op.target, "__name__", "") else len(sizes) - 1  # columns: channels of a convolution, features else
        n, rows = (-(-sizes[d] // self._cut(layout, d)) if d >= 0 else 1 for d in (last, last - 1))
        m = max(1, int(numel / n)) if any(op.weight) else rows  # rows share a weight, products of activations are a batch
        return m, n, max(1, int(op.flops * share / 2 / max(numel, 1)))

    def _cut(self, layout: Layout, dim: int) -> int:
        """Into how many parts a layout cuts a dim."""
        return math.prod(s for e, s in zip(layout, self.sizes, strict=True) if e.partition("/")[0] == f"S{dim}")

    def table_s(self, rows: Sequence[Pair], columns: Sequence[Pair], size_bytes: float,
                again: Sequence[bool] = (), *, weight: bool = False, grad_bytes: float | None = None) -> np.ndarray:
        """Seconds of the reshard from each row to each column, forward and backward, of a tensor of `size_bytes` (`weight`: of a
        parameter) with a gradient of `grad_bytes` (None: as many).

        `again` says for which columns the gathered copy is not kept but gathered once more in the backward (weights that
        the backward needs).
        """
        sources, targets = [r.value for r in rows], [c.value for c in columns]
        seconds, gathers = self._changes(sources, targets, size_bytes)
        graded = np.array([[NO_GRAD not in r.grad and NO_GRAD not in c.grad for c in columns] for r in rows])
        if not graded.any():
            return seconds
        backward_s = self._back_s(rows, columns, grad_bytes or size_bytes, weight, size_bytes)
        once = [any(map(is_placed, target)) for target in targets]  # codegen.edges.Reshard.regathers says why
        twice = gathers & graded & np.array([*again] or [False] * len(columns)) & ~np.array(once)
        return seconds * np.where(twice, 2.0, 1.0) + np.where(graded, backward_s, 0.0)

    def _back_s(self, rows: Sequence[Pair], columns: Sequence[Pair], size_bytes: float, weight: bool, leaf_bytes: float) -> np.ndarray:
        """[rows, columns]: seconds of the way back of the gradient of `size_bytes`, anything where there is none; of weights that are
        gathered once per step with that gather, of `leaf_bytes`, which all readers share as they share the sum of their gradients."""
        seconds = self._changes([self._grad(c) for c in columns], [self._grad(r) for r in rows], size_bytes)[0].T
        once = [i for i, r in enumerate(rows) if weight and gathered_axes(r.value, r.grad)]
        if once:
            chosen = [rows[i] for i in once]
            seconds = seconds.copy()
            seconds[once] = self._read_s(chosen, columns, size_bytes) + self._summed_s(chosen, columns, size_bytes) + self._leaf_s(chosen, leaf_bytes)
        return seconds

    def _read_s(self, rows: Sequence[Pair], columns: Sequence[Pair], size_bytes: float) -> np.ndarray:
        """Seconds from the gradients that readers leave to that of the leaf."""
        return self._pairs_s([[(self._grad(c), self._grad(Pair(r.value, synced(r, c)))) for c in columns] for r in rows], size_bytes)

    def _summed_s(self, rows: Sequence[Pair], columns: Sequence[Pair], size_bytes: float) -> np.ndarray:
        """Seconds from the gradient of the leaf to that at rest."""
        return self._pairs_s([[(self._grad(Pair(r.value, synced(r, c))), self._grad(r)) for c in columns] for r in rows], size_bytes)

    def _leaf_s(self, rows: Sequence[Pair], size_bytes: float) -> np.ndarray:
        """[rows, 1]: seconds from rest to leaf."""
        return self._pairs_s([[(self._grad(r), r.value)] if gathered_axes(r.value, r.grad) else [(r.value, r.value)] for r in rows], size_bytes)

    def _grad(self, uses: Pair) -> Layout:
        """The gradient's layout, something harmless where there is none."""
        return tuple("R" for _ in self.sizes) if NO_GRAD in uses.grad else uses.grad

    def _changes(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds from each source to each target layout, and whether a gather is among the steps; distinct ones once."""
        ids, where = self._ways(sources, targets)
        return self.paths.seconds(ids, size_bytes)[where], self.paths.gathers(ids)[where]

    def _pairs_s(self, cells: Sequence[Sequence[tuple[Layout, Layout]]], size_bytes: float) -> np.ndarray:
        """Seconds of the change in each cell, from one layout to the other."""
        return self.paths.seconds(np.array([[self.paths.number(a, b) for a, b in line] for line in cells]), size_bytes)

    def _ways(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """The ways between distinct layouts, and where in them each source and target is."""
        src, dst = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        at_src, at_dst = {s: i for i, s in enumerate(src)}, {d: i for i, d in enumerate(dst)}
        return self.paths.ids(src, dst), np.ix_([at_src[s] for s in sources], [at_dst[d] for d in targets])

    def made_bytes(self, rows: Sequence[Pair], columns: Sequence[Pair], size_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """For each row and column whether the reshard's result has memory of its own, and how many bytes per device that is."""
        ids, where = self._ways([r.value for r in rows], [c.value for c in columns])
        held = self.paths.held(ids)[where]
        fresh = ~np.isnan(held)
        return fresh, np.where(fresh, size_bytes * held, 0.0)

    def rest_bytes(self, op: Op, options: Sequence[Option]) -> float:
        """Bytes on the rank that holds most of a value that lies still (parameter, buffer, constant, input), all its instances; a parameter
        with its gradient, its optimizer state, and its leaf where that is another tensor."""
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
        own = 0.0
        if op.target in INSIDE and self.settings.training and any(t.grad for t in op.call.outs):
            own = INSIDE[op.target].kept_bytes(Site(op.call.ins, options, self.sizes))
        if self.settings.training and any(t.grad for t in op.call.outs):
            own += sum(algorithm.inside.kept_bytes(site) for algorithm, site in sites(op, options, self.sizes) if algorithm.inside)
        layout = tuple(option.outs[0].value for option in options)
        for index in op.copies:
            own += self.local_bytes(math.prod(op.call.ins[index].sizes) * op.call.ins[index].itemsize, tuple(option.ins[index].value for option in options))
        return (own + self.local_bytes(op.extra_bytes, layout)) * op.count

    def update_s(self, op: Op, options: Sequence[Option]) -> float:
        """Seconds of the optimizer's step on one parameter, all its instances: one pass that reads weight, gradient and
        state and writes all but the gradient. No launch floor but `update_s`: torch's fused and foreach optimizers run over all parameters."""
        held = self._held(op, Resting.of(options)) if op.role == "param" and self.settings.training and op.call.outs[0].grad else None
        if held is None:
            return 0.0
        rests = held.master or held.weights
        moved = 2 * (rests + held.optimizer) + held.gradients + self._cast_bytes(op, rests)
        moved_s = moved / (self.device.memory_bandwidth_bytes_s * self.device.achievable_bandwidth * self.device.update)
        return moved_s + self.device.update_s * op.count

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
        return parameter_bytes(numel, dtype, precision=self.settings.precision, optimizer=self.settings.optimizer,
                               training=self.settings.training and op.call.outs[0].grad,
                               leaf=self._elements(op, lies.leaf) * op.count if lies.gathered else None)

    def local_bytes(self, size_bytes: float, layout: Layout) -> float:
        """Bytes that one rank has of a tensor of `size_bytes`."""
        return size_bytes * self._share(layout)

    def _share(self, layout: Layout) -> float:
        share = self._shares.get(layout)
        if share is None:
            share = self._shares[layout] = fraction(layout, self.sizes)
        return share
