"""Seconds and bytes of the parts of a problem: operators on shards, reshards, parameters at rest.

    operator   forward + backward roofline time of its local FLOPs and bytes, times how often it runs
    reshard    steps(value -> value) forward and steps(gradient -> gradient) backward (layout.steps: what the runtime runs)
    weight     a reshard whose gather is repeated in the backward (the gathered copy is not kept)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopar.cluster import Device, Mesh
from autopar.cost.comm import steps_s
from autopar.cost.compute import op_s
from autopar.cost.memory import parameter_bytes
from autopar.layout import NO_GRAD, Layout, fraction, steps
from autopar.problem.graph import Op
from autopar.rules.algorithms import ALGORITHMS
from autopar.rules.language import Option, Use

Pair = tuple[Layout, Layout]  # layouts of a value and of its gradient


@dataclass(frozen=True)
class Settings:
    """What is trained and how: `mode` train or inference, the optimizer's name, the compute precision."""

    mode: str = "train"
    optimizer: str = "adamw"
    precision: str = "float32"

    @property
    def training(self) -> bool:
        return self.mode == "train"


def pair(uses: tuple[Use, ...]) -> Pair:
    """The layouts of value and gradient, from one use per axis."""
    return tuple(u.value for u in uses), tuple(u.grad for u in uses)


class Prices:
    """Prices on one mesh of one cluster."""

    def __init__(self, mesh: Mesh, device: Device, settings: Settings) -> None:
        self.mesh, self.device, self.settings = mesh, device, settings
        self.sizes = tuple(axis.size for axis in mesh.axes)
        self._reshard = lru_cache(maxsize=None)(self._reshard_s)
        self._op: dict[tuple[str, tuple[str, ...]], float] = {}

    @cached_property
    def overlap(self) -> float:
        """The share of compute under which collectives can hide: none on a CPU, whose cores do both."""
        return 0.0 if self.device.kind == "cpu" else 0.8

    def op_s(self, op: Op, options: tuple[Option, ...]) -> float:
        """Seconds per step of one Op under one option per axis, collectives of its own algorithm included."""
        key = (op.name, tuple(o.factor for o in options))
        if key not in self._op:
            self._op[key] = self._op_s(op, options) * op.count
        return self._op[key]

    def _op_s(self, op: Op, options: tuple[Option, ...]) -> float:
        if op.role != "op":
            return 0.0
        share = math.prod(1.0 / n for o, n in zip(options, self.sizes, strict=True) if o.split)
        moved = op.bytes * self._moved(op, options)
        dtype = str(op.out_dtypes[0]).removeprefix("torch.")
        matmul = self._matmul(op, options, share)
        seconds = op_s(op.flops * share, moved, dtype, self.device, matmul=matmul)
        if self.settings.training and any(t.grad for t in op.call.outs):
            seconds += op_s(op.backward_flops * share, 2 * moved, dtype, self.device, matmul=matmul)
        return seconds + self._algorithms(op, options)

    def _moved(self, op: Op, options: tuple[Option, ...]) -> float:
        """Local share of the bytes of all tensors of `op`."""
        whole = local = 0.0
        for index, tensor in enumerate(op.tensors):
            layout = tuple((*o.ins, *o.outs)[index].value for o in options)
            numel = math.prod(tensor.sizes)
            whole += numel
            local += numel * fraction(layout, self.sizes)
        return local / whole if whole else 1.0

    def _matmul(self, op: Op, options: tuple[Option, ...], share: float) -> tuple[int, int, int] | None:
        """Local (m, n, k) of a contraction with one output, from its FLOPs 2 m n k and the output's last dim."""
        if op.flops <= 0 or not op.call.outs[0].sizes or sum(len(t.sizes) > 1 for t in op.call.ins) < 2:
            return None
        layout = tuple(o.outs[0].value for o in options)
        sizes = op.call.outs[0].sizes
        numel = math.prod(sizes) * fraction(layout, self.sizes)
        last = len(sizes) - 1
        cut = math.prod(s for e, s in zip(layout, self.sizes, strict=True) if e.startswith(f"S{last}"))
        n = max(1, sizes[-1] // cut)
        return max(1, int(numel / n)), n, max(1, int(op.flops * share / 2 / max(numel, 1)))

    def _algorithms(self, op: Op, options: tuple[Option, ...]) -> float:
        seconds = 0.0
        for axis, option in enumerate(options):
            if option.run:
                seconds += ALGORITHMS[option.run].seconds(op, options, axis, self.mesh, self.settings.training)
        return seconds

    def reshard_s(self, src: Pair, dst: Pair, size_bytes: float, *, weight: bool = False) -> float:
        """Seconds of one reshard, forward and backward; a weight's gather runs again in the backward."""
        return self._reshard(src, dst, size_bytes, weight)

    def _reshard_s(self, src: Pair, dst: Pair, size_bytes: float, weight: bool) -> float:
        forward = steps(src[0], dst[0], self.sizes)
        seconds = steps_s(forward, size_bytes, self.mesh)
        if NO_GRAD in src[1] or NO_GRAD in dst[1]:
            return seconds
        if weight and any(s.kind == "all_gather" for s in forward):
            seconds *= 2
        return seconds + steps_s(steps(dst[1], src[1], self.sizes), size_bytes, self.mesh)

    def rest_bytes(self, op: Op, layout: Layout) -> float:
        """Bytes per device of one parameter with its gradient and optimizer state, all its instances."""
        numel = math.prod(op.call.outs[0].sizes) * fraction(layout, self.sizes)
        dtype = str(op.out_dtypes[0]).removeprefix("torch.")
        held = parameter_bytes(numel, dtype, precision=self.settings.precision, optimizer=self.settings.optimizer,
                               training=self.settings.training and op.call.outs[0].grad)
        return held.total * op.count

    def local_bytes(self, size_bytes: float, layout: Layout) -> float:
        return size_bytes * fraction(layout, self.sizes)
