"""Seconds of the kernels of operators on shards: a roofline of the local FLOPs and bytes (cost.compute), forward and
backward.

The local work depends on the number of shards along each factor, not on which mesh axes split it. A search over many
meshes asks for the same shards again and again, so each is priced once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from autopar.cluster import Device
from autopar.cost.comm import copy_s
from autopar.cost.compute import (
    BACKWARD,
    RAMP,
    Shape,
    aligned_share,
    attention_share,
    drawing_s,
    matmul_efficiency,
    op_s,
    straight_share,
)
from autopar.cost.memory import itemsize
from autopar.layout import Layout, fraction, most_elements
from autopar.problem.graph import ATTENTION, Op
from autopar.problem.op_algorithms import sites
from autopar.problem.settings import Settings
from autopar.problem.traffic import NORMS
from autopar.rules import tiles
from autopar.rules.arguments import given
from autopar.rules.experts import INSIDE
from autopar.rules.language import Option
from autopar.rules.site import Site
from passes.annotate_flops import FLOPS

MASKS = frozenset((ATTENTION, torch.ops.aten.bernoulli.p, torch.ops.aten.dropout.default))
"""Operators that draw zeros and ones."""


class Kernels:
    """Prices of the operators of one program on one kind of device, on all meshes."""

    def __init__(self, device: Device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self._found: dict[tuple[object, ...], tuple[float, float]] = {}

    def seconds(self, op: Op, options: tuple[Option, ...], sizes: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of one run of `op` on the slowest rank, forward and backward (0 where there is none), without
        collectives of its own. `options` and `sizes` have one entry per mesh axis."""
        key = _shard_of(op, options, sizes)
        if key not in self._found:
            self._found[key] = _Shard(self, op, options, sizes).seconds()
        return self._found[key]


def multiplies(op: Op) -> bool:
    """Whether an Op runs on the matrix units: matmuls, convolutions, attention."""
    return (
        op.target in FLOPS
        and op.flops > 0
        and bool(op.call.outs[0].sizes)
        and sum(len(t.sizes) > 1 for t in op.call.ins) > 1
    )


def matmul_dtype(op: Op, settings: Settings) -> str:
    """The dtype in which an Op multiplies: `Settings.matmul`, where given, for matmuls with a weight, else its own."""
    return settings.matmul if settings.matmul and any(op.weight) else op.dtype


def _shard_of(op: Op, options: Sequence[Option], sizes: Sequence[int]) -> tuple[object, ...]:
    """Cache key of a shard of an Op: the number of shards along each factor; for operators that use a runtime algorithm
    also on which axes."""
    if any(option.run for option in options):
        return op.name, tuple(option.factor for option in options), tuple(sizes)
    ways: dict[str, int] = {}
    for option, size in zip(options, sizes, strict=True):
        ways[option.factor] = ways.get(option.factor, 1) * (size if option.split else 1)
    return op.name, *sorted(ways.items())


def _share(options: Sequence[Option], sizes: Sequence[int], uneven: float) -> float:
    """The share of the FLOPs of an Op that a rank does: with even shards the product over factors of 1 - cuts + cuts /
    n, where n ranks split the share `cuts` of the work along that factor (Option.cuts). Of what is cut the rank that
    has most does `uneven` times as much."""
    ways: dict[tuple[str, float], int] = {}
    for option, size in zip(options, sizes, strict=True):
        ways[option.factor, option.cuts] = ways.get((option.factor, option.cuts), 1) * (size if option.split else 1)
    cut = math.prod(cuts / n for (_, cuts), n in ways.items())
    return math.prod(1.0 - cuts + cuts / n for (_, cuts), n in ways.items()) + (uneven - 1.0) * cut


class _Shard:
    """The shard of one Op under one option per mesh axis. `used`: the runtime algorithms, with the site of each;
    `tiled`: the number of tiles in which a weight is gathered."""

    def __init__(self, kernels: Kernels, op: Op, options: tuple[Option, ...], sizes: tuple[int, ...]) -> None:
        self.device, self.settings = kernels.device, kernels.settings
        self.op, self.sizes = op, sizes
        self.used, self.tiled = sites(op, options, sizes), tiles.tiled(options)
        self.options = tuple(map(tiles.as_worked, options)) if self.tiled > 1 else options

    def seconds(self) -> tuple[float, float]:
        """Seconds of the forward, and of the backward (0 where there is none)."""
        op, used = self.op, self.used
        share = _share(self.options, self.sizes, self._unevenness())
        share *= max((algorithm.pace(site) for algorithm, site in used), default=1.0)
        local = self._bytes_share()
        inside = sum(algorithm.inside.moved_bytes(site) for algorithm, site in used if algorithm.inside)
        if op.target in INSIDE:
            inside += INSIDE[op.target].moved_bytes(Site(op.call.ins, self.options, self.sizes, call=op.call))
        forward, backward = (op.fused_bytes, op.fused_backward_bytes) if self.settings.fused else self._eager_bytes()
        matmul, beside = self._matmul(share), self._beside_bytes()
        ahead = self._kernels_s(op.flops * share, forward * local + inside + beside[0], matmul, 0) + self._draws_s()
        if not (self.settings.training and op.graded):
            return ahead, 0.0
        return ahead, self._kernels_s(
            op.backward_flops * share, backward * local + 2 * inside + beside[1], matmul, 1
        ) + self._bias_s()

    def _eager_bytes(self) -> tuple[float, float]:
        """Bytes of the unfused kernels of an Op, forward and backward; those that are moved with a lower bandwidth
        (Op.rows_bytes) are scaled up so that full bandwidth gives the same time."""
        op = self.op
        row = op.call.outs[0].sizes[-1] * op.call.outs[0].itemsize if op.target in NORMS else None
        scaled_up = 1 / straight_share(self.device, row) - 1
        return op.bytes + scaled_up * op.rows_bytes[0], op.backward_bytes + scaled_up * op.rows_bytes[1]

    def _bias_s(self) -> float:
        """Seconds of the kernel that sums the gradients of all rows to that of a bias; 0 where there is none."""
        op = self.op
        nbytes = op.fused_bias_bytes if self.settings.fused else op.bias_bytes
        if not nbytes:
            return 0.0
        local = fraction(tuple(o.outs[0].value for o in self.options), self.sizes)
        straight = 1.0 if self.settings.fused else straight_share(self.device)
        return op_s(0.0, local * nbytes / straight, op.dtype, self.device)

    def _draws_s(self) -> float:
        """Seconds of drawing random numbers: one for each element of the result, in attention for each score."""
        op = self.op
        if not op.draws:
            return 0.0
        sizes = op.call.outs[0].sizes
        if op.target is ATTENTION:
            sizes = (*sizes[:-1], op.call.ins[1].sizes[-2])
        drawn = most_elements(sizes, op.drawn(tuple(o.outs[0].value for o in self.options)), self.sizes)
        return drawing_s(drawn, self.device, masks=op.target in MASKS)

    def _beside_bytes(self) -> tuple[float, float]:
        """Bytes, forward and backward, that tiles read and write beyond one pass over all tensors."""
        found = [tiles.moved_bytes(site) for algorithm, site in self.used if algorithm.gathers]
        return sum(ahead for ahead, _ in found), sum(back for _, back in found)

    def _kernels_s(self, flops: float, nbytes: float, matmul: Shape | None, direction: int) -> float:
        """`_kernel_s` for each tile, added up; `flops` and `nbytes` are those of all tiles."""
        return self.tiled * self._kernel_s(flops / self.tiled, nbytes / self.tiled, matmul, direction)

    def _kernel_s(self, flops: float, nbytes: float, matmul: Shape | None, direction: int) -> float:
        """Seconds of the kernels of one direction (0 forward, 1 backward) with local `flops` and `nbytes`, and of casts
        to the dtype of the matmul. An operator fused into the kernel of its reader pays no launch."""
        op = self.op
        dtype = matmul_dtype(op, self.settings) if matmul else op.dtype
        share = self._share_of_peak(flops, dtype, matmul, direction)
        seconds = op_s(flops, nbytes, dtype, self.device, matmul=matmul, share=share)
        if dtype != op.dtype:
            seconds += copy_s(self._cast_bytes(direction) / 2 / self.tiled, self.device)
        fused = self.settings.fused and not op.leads
        return max(0.0, seconds - self.device.launch_s) if fused and seconds else seconds

    def _cast_bytes(self, direction: int) -> float:
        """Bytes read and written to quantise the first operand (in the backward: the gradient of the result). With
        `Settings.casts_shards` an operand that is gathered is cast before the gather, each rank its shard."""
        op, settings = self.op, self.settings
        tensor = (op.call.ins[0], op.call.outs[0])[direction]
        layout = tuple((o.ins[0], o.outs[0])[direction].value for o in self.options)
        elements, held = math.prod(tensor.sizes), fraction(layout, self.sizes)
        cast = (
            held / math.prod(n for n, entry in zip(self.sizes, layout, strict=True) if entry == "R")
            if settings.casts_shards and not direction
            else held
        )
        return elements * (settings.cast_bytes * cast + settings.turn_bytes * held)

    def _share_of_peak(self, flops: float, dtype: str, matmul: Shape | None, direction: int) -> float | None:
        """The share of the peak of `dtype` that the matmuls of an Op reach in one direction (formulas: cost.compute,
        docs/cost-model.md); None where it has none."""
        op = self.op
        if matmul is None:
            return None
        device = self.device
        if op.target is ATTENTION and device.attention is not None:
            keys, ramp = op.call.ins[1].sizes[-2], RAMP * device.tile * (2 if given(op.call)["is_causal"] else 1)
            return (
                attention_share(device, direction, op.call.ins[0].sizes[-1], self.settings.attention)
                * keys
                / (keys + ramp)
                * device.sustained
            )
        m, n, k = matmul
        shapes = [(m, n, k)] if direction == 0 else [(m, k, n), (n, k, m)]  # gradients of rows, and of the weight
        found = [matmul_efficiency(flops / len(shapes), shape, device) for shape in shapes]
        backward_share = BACKWARD[device.kind] if direction and any(op.weight) else 1.0
        aligned = aligned_share((n, k), itemsize(op.dtype), device)
        if aligned < 1 and not any(op.weight):
            return device.flops("float32") / device.flops(dtype) * device.achievable * device.sustained
        other = self.settings.matmul_share if dtype != op.dtype else 1.0
        return (
            len(found)
            / sum(1 / share for share in found)
            * aligned
            * backward_share
            * other
            * device.best_share(dtype)
            / device.achievable
            * device.sustained
        )

    def _bytes_share(self) -> float:
        """The share of the elements of all tensors that the rank has which has most."""
        whole = sum(math.prod(tensor.sizes) for tensor in self.op.tensors)
        return sum(most for most, _ in self._elements) / whole if whole else 1.0

    def _unevenness(self) -> float:
        """The work of the rank that has most, over that with even shards: 4 / 3 where one of two ranks has two of three
        heads."""
        return max((most / mean for most, mean in self._elements if mean), default=1.0)

    @cached_property
    def _elements(self) -> list[tuple[int, float]]:
        """Of each tensor, the elements on the rank that has most, and on the mean of all ranks."""
        layouts = [tuple((*o.ins, *o.outs)[index].value for o in self.options) for index in range(len(self.op.tensors))]
        return [
            (
                most_elements(tensor.sizes, layout, self.sizes),
                math.prod(tensor.sizes) * fraction(layout, self.sizes),
            )
            for tensor, layout in zip(self.op.tensors, layouts, strict=True)
        ]

    def _matmul(self, share: float) -> Shape | None:
        """Local (m, n, k) of the matmul of an Op, None where it has none: n is the local size of the last dim of the
        output (of a convolution its channels), m the other local elements over n, and k = flops / (2 m n). `share`: of
        the FLOPs, on this rank."""
        op = self.op
        if not multiplies(op):
            return None
        layout = tuple(o.outs[0].value for o in self.options)
        sizes = op.call.outs[0].sizes
        numel = most_elements(sizes, layout, self.sizes)
        # dims of space, as many as the kernel has
        behind = len(op.call.ins[1].sizes) - 2 if "conv" in getattr(op.target, "__name__", "") else 0
        # columns: channels of a convolution, of one sample without a batch too, features else
        last = len(sizes) - 1 - behind
        n, rows = (-(-sizes[d] // self._cut(layout, d)) if d >= 0 else 1 for d in (last, last - 1))
        # rows share a weight, products of activations are a batch
        m = max(1, int(numel / n)) if any(op.weight) else rows
        inner = max(1, int(op.flops * share / 2 / max(numel, 1)))
        if self.tiled > 1 and op.target in tiles.BY_OUTPUTS:
            return m, max(1, n // self.tiled), inner
        return m, n, max(1, inner // self.tiled)

    def _cut(self, layout: Layout, dim: int) -> int:
        """The number of shards of a dim under a layout."""
        return math.prod(s for e, s in zip(layout, self.sizes, strict=True) if e.partition("/")[0] == f"S{dim}")
