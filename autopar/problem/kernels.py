"""Seconds of the kernels of operators on shards: a roofline of the local FLOPs and bytes (cost.compute), forward and backward.

What is computed on a rank depends on how often each kind of split is made, not on which axes make it: a search over many meshes
asks for the same shards again and again, and each is priced once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.cluster import Device
from autopar.cost.comm import copy_s
from autopar.cost.compute import (
    BACKWARD,
    RAMP,
    Shape,
    aligned_share,
    attention_share,
    matmul_efficiency,
    op_s,
    straight_share,
)
from autopar.cost.memory import itemsize
from autopar.layout import Layout, fraction
from autopar.problem.graph import Op
from autopar.problem.op_algorithms import sites
from autopar.problem.settings import Settings
from autopar.problem.traffic import NORMS
from autopar.rules import tiles
from autopar.rules.arguments import given
from autopar.rules.experts import INSIDE
from autopar.rules.language import Option
from autopar.rules.site import Site

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Kernels:
    """Prices of the operators of one program on one kind of device, on all meshes."""

    def __init__(self, device: Device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self._found: dict[tuple[object, ...], tuple[float, float]] = {}

    def seconds(self, op: Op, options: tuple[Option, ...], sizes: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of one run of `op` on the slowest rank, forward and backward (0 where there is none), without collectives of its own.
        `options` and `sizes` have one entry per mesh axis."""
        key = _shard_of(op, options, sizes)
        if key not in self._found:
            self._found[key] = _Shard(self, op, options, sizes).seconds()
        return self._found[key]


def multiplies(op: Op) -> bool:
    """Whether an Op runs on the matrix units: products, convolutions, attention."""
    return op.flops > 0 and bool(op.call.outs[0].sizes) and sum(len(t.sizes) > 1 for t in op.call.ins) > 1


def matmul_dtype(op: Op, settings: Settings) -> str:
    """The dtype in which an Op multiplies."""
    return settings.matmul if settings.matmul and any(op.weight) else op.dtype


def _shard_of(op: Op, options: Sequence[Option], sizes: Sequence[int]) -> tuple[object, ...]:
    """What tells apart shards of an Op: how many ways each factor is cut; where an algorithm splits it, on which axis too."""
    if any(option.run for option in options):
        return op.name, tuple(option.factor for option in options), tuple(sizes)
    ways: dict[str, int] = {}
    for option, size in zip(options, sizes, strict=True):
        ways[option.factor] = ways.get(option.factor, 1) * (size if option.split else 1)
    return op.name, *sorted(ways.items())


def _share(options: Sequence[Option], sizes: Sequence[int]) -> float:
    """The share of the work of an Op that a rank does, where shards are even."""
    ways: dict[tuple[str, float], int] = {}
    for option, size in zip(options, sizes, strict=True):
        ways[option.factor, option.cuts] = ways.get((option.factor, option.cuts), 1) * (size if option.split else 1)
    return math.prod(1.0 - cuts + cuts / n for (_, cuts), n in ways.items())


class _Shard:
    """One Op cut in one way."""

    def __init__(self, kernels: Kernels, op: Op, options: tuple[Option, ...], sizes: tuple[int, ...]) -> None:
        self.device, self.settings = kernels.device, kernels.settings
        self.op, self.sizes = op, sizes
        self.used, self.tiled = sites(op, options, sizes), tiles.tiled(options)
        self.options = tuple(map(tiles.as_worked, options)) if self.tiled > 1 else options

    def seconds(self) -> tuple[float, float]:
        """Forward, and backward."""
        op, used = self.op, self.used
        share = _share(self.options, self.sizes) * max((algorithm.pace(site) for algorithm, site in used), default=1.0)
        local = self._moved()
        inside = sum(algorithm.inside.moved_bytes(site) for algorithm, site in used if algorithm.inside)
        if op.target in INSIDE:
            inside += INSIDE[op.target].moved_bytes(Site(op.call.ins, self.options, self.sizes, call=op.call))
        forward, backward = (op.fused_bytes, op.fused_backward_bytes) if self.settings.fused else self._eager_bytes()
        matmul, beside = self._matmul(share), self._beside_bytes()
        ahead = self._kernels_s(op.flops * share, forward * local + inside + beside[0], matmul, 0)
        if not (self.settings.training and op.graded):
            return ahead, 0.0
        return ahead, self._kernels_s(op.backward_flops * share, backward * local + 2 * inside + beside[1], matmul, 1) + self._bias_s()

    def _eager_bytes(self) -> tuple[float, float]:
        """Bytes that would take, straight through, as long as what the kernels of an Op by itself move."""
        op = self.op
        row = op.call.outs[0].sizes[-1] * op.call.outs[0].itemsize if op.target in NORMS else None
        longer = 1 / straight_share(self.device, row) - 1
        return op.bytes + longer * op.rows_bytes[0], op.backward_bytes + longer * op.rows_bytes[1]

    def _bias_s(self) -> float:
        """Seconds of the gradient of a bias, if there is one: the gradients of all rows added up."""
        op = self.op
        nbytes = op.fused_bias_bytes if self.settings.fused else op.bias_bytes
        if not nbytes:
            return 0.0
        local = fraction(tuple(o.outs[0].value for o in self.options), self.sizes)
        straight = 1.0 if self.settings.fused else straight_share(self.device)
        return op_s(0.0, local * nbytes / straight, op.dtype, self.device)

    def _beside_bytes(self) -> tuple[float, float]:
        """What tiles read and write beside one pass over all tensors, forward and backward."""
        found = [tiles.moved_bytes(site) for algorithm, site in self.used if algorithm.gathers]
        return sum(ahead for ahead, _ in found), sum(back for _, back in found)

    def _kernels_s(self, flops: float, nbytes: float, matmul: Shape | None, direction: int) -> float:
        """As `_kernel_s`, of as many kernels as there are tiles."""
        return self.tiled * self._kernel_s(flops / self.tiled, nbytes / self.tiled, matmul, direction)

    def _kernel_s(self, flops: float, nbytes: float, matmul: Shape | None, direction: int) -> float:
        """Seconds of the kernels of one direction (0 forward, 1 backward)."""
        op = self.op
        dtype = matmul_dtype(op, self.settings) if matmul else op.dtype
        share = self._share_of_peak(flops, dtype, matmul, direction)
        seconds = op_s(flops, nbytes, dtype, self.device, matmul=matmul, share=share)
        if dtype != op.dtype:
            seconds += copy_s(self._cast_bytes(direction) / 2 / self.tiled, self.device)
        follows = self.settings.fused and not op.leads
        return max(0.0, seconds - self.device.launch_s) if follows and seconds else seconds

    def _cast_bytes(self, direction: int) -> float:
        """Bytes read and written to quantise what comes in, a gradient in the backward. What is gathered in few bits is cast before that, by shards."""
        op, settings = self.op, self.settings
        tensor = (op.call.ins[0], op.call.outs[0])[direction]
        layout = tuple((o.ins[0], o.outs[0])[direction].value for o in self.options)
        elements, held = math.prod(tensor.sizes), fraction(layout, self.sizes)
        cast = held / math.prod(n for n, entry in zip(self.sizes, layout, strict=True) if entry == "R") if settings.casts_shards and not direction else held
        return elements * (settings.cast_bytes * cast + settings.turn_bytes * held)

    def _share_of_peak(self, flops: float, dtype: str, matmul: Shape | None, direction: int) -> float | None:
        """The share of the peak of `dtype` that the matmuls of an Op reach; None where it has none."""
        op = self.op
        if matmul is None:
            return None
        device = self.device
        if op.target is ATTENTION and device.attention is not None:
            keys, ramp = op.call.ins[1].sizes[-2], RAMP * device.tile * (2 if given(op.call)["is_causal"] else 1)
            return attention_share(device, direction, op.call.ins[0].sizes[-1], self.settings.attention) * keys / (keys + ramp) * device.sustained
        m, n, k = matmul
        shapes = [(m, n, k)] if direction == 0 else [(m, k, n), (n, k, m)]  # gradients of rows, and of the weight
        found = [matmul_efficiency(flops / len(shapes), shape, device) for shape in shapes]
        turned = BACKWARD[device.kind] if direction and any(op.weight) else 1.0
        aligned = aligned_share((n, k), itemsize(op.dtype), device)
        if aligned < 1 and not any(op.weight):
            return device.flops("float32") / device.flops(dtype) * device.achievable * device.sustained
        other = self.settings.matmul_share if dtype != op.dtype else 1.0
        return len(found) / sum(1 / share for share in found) * aligned * turned * other * device.best_share(dtype) / device.achievable * device.sustained

    def _moved(self) -> float:
        """Local share of the bytes of all tensors."""
        whole = local = 0.0
        for index, tensor in enumerate(self.op.tensors):
            layout = tuple((*o.ins, *o.outs)[index].value for o in self.options)
            numel = math.prod(tensor.sizes)
            whole += numel
            local += numel * fraction(layout, self.sizes)
        return local / whole if whole else 1.0

    def _matmul(self, share: float) -> Shape | None:
        """Local (m, n, k) of a contraction with one output, from its FLOPs 2 m n k and the output's last dim."""
        op = self.op
        if not multiplies(op):
            return None
        layout = tuple(o.outs[0].value for o in self.options)
        sizes = op.call.outs[0].sizes
        numel = math.prod(sizes) * fraction(layout, self.sizes)
        behind = len(op.call.ins[1].sizes) - 2 if "conv" in getattr(op.target, "__name__", "") else 0  # dims of space, as many as the kernel has
        last = len(sizes) - 1 - behind  # columns: channels of a convolution, of one sample without a batch too, features else
        n, rows = (-(-sizes[d] // self._cut(layout, d)) if d >= 0 else 1 for d in (last, last - 1))
        m = max(1, int(numel / n)) if any(op.weight) else rows  # rows share a weight, products of activations are a batch
        inner = max(1, int(op.flops * share / 2 / max(numel, 1)))
        if self.tiled > 1 and op.target in tiles.BY_OUTPUTS:
            return m, max(1, n // self.tiled), inner
        return m, n, max(1, inner // self.tiled)

    def _cut(self, layout: Layout, dim: int) -> int:
        """Into how many parts a layout cuts a dim."""
        return math.prod(s for e, s in zip(layout, self.sizes, strict=True) if e.partition("/")[0] == f"S{dim}")
