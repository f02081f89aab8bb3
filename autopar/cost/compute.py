"""Seconds of one operator on one device: a roofline.

    seconds = launch floor + max(flops / (peak x matmul efficiency), bytes / (bandwidth x achievable share))

Matmul efficiency is the device's published best (Device.achievable, measured at Device.best_shape) times a smooth
function of the shape that is 1 there:

    edges   m / (m + tile/4), the same for n    parts of output tiles that are computed and thrown away
    depth   k / (k + tile/2)                    filling and draining the pipeline of one tile
    fill    (1 + (units / tiles)^3)^(-1/3)      fewer output tiles than multiprocessors leave some idle

Each is increasing in its sizes, and no operator gets faster when it grows.
"""

from __future__ import annotations

from typing import TypeVar

import sympy

from autopar.cluster import Device

Shape = tuple[int, int, int]
Number = TypeVar("Number", float, sympy.Expr)

# Operators without a matmul run on the vector units at about the float32 rate, whatever their dtype.
VECTOR_DTYPE = "float32"


def op_s(flops: float, nbytes: float, dtype: str, device: Device, *, matmul: Shape | None = None) -> float:
    """Seconds of an operator that does `flops` and reads and writes `nbytes`, all local to the device.

    `matmul` is its local (m, n, k), for a convolution those of its implicit matmul; a batch of matmuls is seen from
    flops / (2 m n k). Neither flops nor bytes (a view): 0 seconds.
    """
    if flops <= 0 and nbytes <= 0:
        return 0.0
    rate = device.flops(dtype if matmul else vector_dtype(dtype, device))
    if matmul:
        rate *= matmul_efficiency(flops, matmul, device)
    return device.launch_s + max(flops / rate, nbytes / (device.memory_bandwidth_bytes_s * device.achievable_bandwidth))


def vector_dtype(dtype: str, device: Device) -> str:
    """The dtype whose peak bounds operators that are no matmul: the slower of `dtype` and float32."""
    return min(dtype, VECTOR_DTYPE, key=device.flops)


def matmul_efficiency(flops: float, matmul: Shape, device: Device) -> float:
    """Share of the peak that a matmul (m, n, k), or a batch of them, reaches: at most `device.achievable`."""
    m, n, k = matmul
    relative = shape_factor(m, n, k, max(1.0, flops / (2.0 * m * n * k)), device) / best_factor(device)
    return device.achievable * min(1.0, relative)


def best_factor(device: Device) -> float:
    """`shape_factor` of the shape that `device.achievable` was measured at, or 1 where that is unknown."""
    if device.best_shape is None:
        return 1.0
    m, n, k = map(float, device.best_shape)
    return shape_factor(m, n, k, 1.0, device)


def shape_factor(m: Number, n: Number, k: Number, batch: Number, device: Device) -> Number:
    """edges x depth x fill, as the module docstring defines them; of numbers or of sympy expressions."""
    tile = device.tile
    tiles = batch * (m + tile / 2) * (n + tile / 2) / tile**2
    edges = m / (m + tile / 4) * n / (n + tile / 4)
    depth = k / (k + tile / 2)
    return edges * depth * (1 + (device.units / tiles) ** 3) ** (-1 / 3)
