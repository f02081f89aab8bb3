"""Seconds of one operator on one device: a roofline.

    seconds = launch floor + max(flops / (peak x matmul efficiency), bytes / (bandwidth x achievable share))

Bytes that fit in a cache that the device states (`cache_bytes`) have its bandwidth instead.

Matmul efficiency is the device's published best (Device.achievable, measured at Device.best_shape) relative to the best
over tiles of output that one multiprocessor works on at a time (TILES) and over cuts of the depth (SPLITS) of

    waves   m n / (area of all the tiles that fit in the time)    tiles run in waves of as many as there are
            multiprocessors; the
                                                                  last wave and the tiles at the edges are computed in
                                                                  full
    reuse   area / (area + reuse (width + height))                small tiles read more for each multiplication
    depth   k / (k + splits x tile / 2)                           filling and draining the pipeline of one tile

On accelerators rows of operands that do not start at multiples of 16 bytes are read element by element or by twos
(`Device.unaligned`). The best shapes that were measured fill whole waves: 1024 x 10240 on 108 multiprocessors is 2.96
waves of 256 x 128, 2048 x 2048 on 132 is 0.97, 1792 x 16128 on 148 is 2.98 of 256 x 256. No operator gets faster when
it grows.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.cluster import Device

Shape = tuple[int, int, int]

# Operators without a matmul run on the vector units at about the float32 rate, whatever their dtype.
VECTOR_DTYPE = "float32"
WIDE = 0.5  # of that rate in float64


def op_s(
    flops: float, nbytes: float, dtype: str, device: Device, *, matmul: Shape | None = None, share: float | None = None
) -> float:
    """Seconds of an operator that does `flops` and reads and writes `nbytes`, all local to the device.

    `matmul` is its local (m, n, k), for a convolution those of its implicit matmul; a batch of matmuls is seen from
    flops / (2 m n k). `share` of the peak replaces the efficiency of that shape where a kernel has one of its own.
    Neither flops nor bytes (a view): 0 seconds.
    """
    if flops <= 0 and nbytes <= 0:
        return 0.0
    if matmul:
        rate = device.flops(dtype) * (matmul_efficiency(flops, matmul, device) if share is None else share)
    else:
        rate = vector_rate(dtype, device)
    return device.launch_s + max(flops / rate, device.memory_s(nbytes))


def vector_rate(dtype: str, device: Device) -> float:
    """FLOP/s of operators that are no matmul: the measured rate of the device, else the peak that bounds them."""
    bound, share = vector_bound(dtype, device)
    return device.vector_flops or device.flops(bound) * share


def drawing_s(elements: float, device: Device, *, masks: bool = False) -> float:
    """Seconds of drawing so many random numbers one after the other, as CPUs do (`masks`: zeros and ones); 0 on
    devices whose threads draw side by side."""
    if device.kind != "cpu":
        return 0.0
    return elements * (DRAWN_MASK if masks else DRAWN_NUMBER) / (device.vector_flops or CORE_VECTOR_FLOPS)


def vector_bound(dtype: str, device: Device) -> tuple[str, float]:
    """(dtype, share): operators that are no matmul run at most at this share of the peak of this dtype. It is the
    slower one of `dtype` and float32. The float64 peak of tensor cores is as high as the float32 peak of vector units,
    which do float64 at half of that at best (A100, H100, MI300X datasheets)."""
    if dtype.removeprefix("torch.") == "float64" and device.flops(dtype) > WIDE * device.flops(VECTOR_DTYPE):
        return VECTOR_DTYPE, WIDE
    return min(dtype, VECTOR_DTYPE, key=device.flops), 1.0


def matmul_efficiency(flops: float, matmul: Shape, device: Device) -> float:
    """Share of the peak that a matmul (m, n, k), or a batch of them, reaches: at most `device.achievable`."""
    m, n, k = matmul
    relative = shape_factor(m, n, k, max(1.0, flops / (2.0 * m * n * k)), device) / best_factor(device)
    return device.achievable * min(1.0, relative)


def straight_share(device: Device, norm_bytes: float | None = None) -> float:
    """The share of the memory bandwidth that eager kernels reach which do not read and write in one straight pass
    (`problem.traffic.by_rows`); with `norm_bytes`, norms of rows of so many bytes. 1 on a CPU, whose accesses are by
    cache lines in any case."""
    rate = (
        BY_ROWS_BYTES_S
        if norm_bytes is None
        else min(NORM_BYTES_S[1], NORM_BYTES_S[0] * max(1.0, norm_bytes / NARROW_BYTES))
    )
    return (
        1.0
        if device.kind == "cpu"
        else min(1.0, device.units * rate / (device.memory_bandwidth_bytes_s * device.achievable_bandwidth))
    )


def aligned_share(sizes: tuple[float, ...], itemsize: int, device: Device) -> float:
    """The share of its rate that a matmul reaches whose operands have rows of `sizes` elements, one after the other in
    memory: less than 1 where these are no multiples of ALIGNED_BYTES (NVIDIA, Matrix Multiplication Background User's
    Guide, section 4; `Device.unaligned`). 1 on a CPU, which copies such rows first."""
    if device.kind == "cpu" or all(size * itemsize % ALIGNED_BYTES == 0 for size in sizes):
        return 1.0
    return device.unaligned[0 if itemsize == 2 and any(size % 2 for size in sizes) else 1]


def attention_share(device: Device, direction: int, width: float, rate: float = 1.0) -> float:
    """Share of the peak that fused attention reaches on long sequences of heads `width` wide, forward (0) or backward
    (1), at `rate` times the device's own."""
    assert device.attention is not None, "asked where it is known"
    return min(1.0, rate * device.attention[direction]) * narrow_share(device, width)


def narrow_share(device: Device, width: float) -> float:
    """The rate of fused attention on heads `width` wide, over that on heads of HEAD (`Device.attention_width`); at most
    1."""
    exponentials = device.attention_width
    return min(1.0, width * (HEAD + exponentials) / (HEAD * (width + exponentials))) if exponentials else 1.0


def best_factor(device: Device) -> float:
    """`shape_factor` of the shape that `device.achievable` was measured at, or 1 where that is unknown."""
    if device.best_shape is None:
        return 1.0
    m, n, k = map(float, device.best_shape)
    return shape_factor(m, n, k, 1.0, device)


ALIGNED_BYTES = 16
"""Rows that start at multiples of this are read whole."""

BY_ROWS_BYTES_S = 11.4e9
"""Bytes per second and multiprocessor at most of eager kernels that do not read and write straight through
(`problem.traffic.by_rows`), however fast the memory is: measured on one H100, 1.5 TB/s on 132, of biases, losses, and
products with a column or a row (benchmarks/README.md, one GPU)."""

NORM_BYTES_S = (9.7e9, 17e9)
NARROW_BYTES = 1536
"""The same for norms, forward and backward together: for rows of NARROW_BYTES and less, and the most for wider ones. A
block of threads computes one row forward, and 32 columns of the gradients of weights, so that narrow rows leave
multiprocessors without work: measured on one H100, 16-bit rows of 768 (1.24 to 1.28 TB/s on 132), of 2048 (2.3) and of
4096 (2.1 TB/s)."""

DRAWN_NUMBER, DRAWN_MASK = 45, 90
CORE_VECTOR_FLOPS = 16e9
"""A random number of a CPU takes as long as so many FLOPs of pointwise operators do, and what a core does of these in a
second where it was not measured. Measured, torch 2.13, one thread of an AVX-512 server: 2.8 (uniform) and 3.4 ns
(normal) for a number, 5.8 for one of a mask, 0.5 for a GELU of 8 FLOPs."""

RAMP = 2
"""Fused attention has keys / (keys + so many tiles) of its rate, of the keys that a row sees on the mean: half of all
where it is causal."""

HEAD = 128
"""The width of heads that `Device.attention` is of."""

BACKWARD = {"cuda": 0.9, "cpu": 1.0}
"""Rate of the matmuls of weights in the backward by kind of device, as a share of the forward's: operands lie
transposed, gradients are added up. Fitted, see docs/cost-model.md; a CPU copies operands into blocks whichever way they
lie (22 shapes, measured: no difference)."""

TILES = ((2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 0.5))
"""Sizes of output tiles in units of Device.tile."""

SPLITS = (1, 2, 4, 8)
"""Into how many pieces the depth may be cut, each with tiles of its own."""

REUSE = 0.16
"""What reading costs a tile, as a share of Device.tile: fitted with `sustained`, see docs/cost-model.md."""


def shape_factor(m: float, n: float, k: float, batch: float, device: Device) -> float:
    """Relative efficiency of `batch` matmuls of `m` by `k` with `k` by `n`: the best over all TILES and SPLITS of waves
    x reuse x depth (module docstring)."""
    return _best_tiling(m, n, k, batch, device.tile, device.units)


@lru_cache(maxsize=1 << 16)
def _best_tiling(m: float, n: float, k: float, batch: float, tile: int, units: int) -> float:
    """`shape_factor` for a given tile and number of multiprocessors; cached, because a search asks for few local sizes,
    over many layouts and meshes."""
    return max(
        _tiled(m, n, k, batch, (width * tile, height * tile), split, tile, units)
        for width, height in TILES
        for split in SPLITS
    )


def _tiled(
    m: float, n: float, k: float, batch: float, size: tuple[float, float], split: int, tile: int, units: int
) -> float:
    """Waves x reuse x depth with output tiles of `size` (width, height in elements) and the depth cut into `split`
    pieces."""
    width, height = size
    tiles = batch * math.ceil(m / width) * math.ceil(n / height) * split
    waves = math.ceil(tiles / units)
    filled = batch * split * m * n / (waves * units * width * height)
    reuse = width * height / (width * height + REUSE * tile * (width + height))
    depth = k / (k + split * tile / 2)
    return filled * reuse * depth
