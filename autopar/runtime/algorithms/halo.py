"""Halo exchange: the rows of an image that is cut along one dim, with the rows of other ranks that a convolution or
pool reads.

The operator itself then runs on what `halo` gives, without padding along that dim: ranks at the ends of the image pad
by hand. The backward sends the gradients of borders back and adds them to those of the rows they came from. Images cut
along two dims take two calls; the second sends the corners that the first brought.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.errors import RunError
from autopar.layout import chunk
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh
from autopar.runtime.neighbours import Parcel, start_transfers
from autopar.window_rows import Window


def halo(
    x: Tensor,
    *,
    dim: int,
    axis: int,
    size: int,
    outs: int,
    reach: int,
    mesh: Mesh,
    stride: int = 1,
    padding: int = 0,
    fill: float = 0.0,
) -> Tensor:
    """This rank's rows `x` of an image with `size` rows along `dim`, cut on mesh axis `axis` as torch.chunk cuts -> the
    rows that its chunk of `outs` outputs reads; those outside of the image are `fill`.

    One output reads `reach` rows (dilation x (kernel - 1) + 1), the next one those `stride` further; `padding` rows are
    in front of the image. Exact for uneven chunks and for any distance between ranks. Raises RunError where `x` does
    not have this rank's rows, or the rank would have no output.
    """
    ways, rank, window = mesh.sizes[axis], mesh.coord[axis], Window(size, outs, reach, stride, padding)
    start, stop = chunk(size, ways, rank)
    if x.shape[dim] != stop - start:
        raise RunError(
            f"halo: the image has {x.shape[dim]} rows along dim {dim}, wanted {stop - start}: chunk {rank} of {ways} "
            f"of {size}"
        )
    first, last = chunk(outs, ways, rank)
    if first == last:
        raise RunError(
            f"halo: rank {rank} of {ways} has none of {outs} outputs along dim {dim} of an image of {size}, and "
            "convolutions and pools of nothing are refused; cut another dim, or use larger images"
        )
    if window.most_sent(ways):
        x = _Borders.apply(x, dim, axis, window, mesh)
    else:
        lo, hi = window.needs(ways, rank)
        x = x.narrow(dim, lo - start if hi > lo else 0, hi - lo)
    pads = window.pads(ways, rank)
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + pads, value=fill) if any(pads) else x


class _Borders(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: int, window: Window, mesh: Mesh) -> Tensor:
        ctx.dim, ctx.axis, ctx.window, ctx.mesh, ctx.shape = dim, axis, window, mesh, x.shape
        ways, me = mesh.sizes[axis], mesh.coord[axis]
        start = chunk(window.size, ways, me)[0]
        sends: list[Parcel] = []
        parts: list[Parcel] = []
        for peer in range(ways):
            lo, hi = window.shared(ways, me, peer)
            if hi > lo:
                sends.append((peer, x.narrow(dim, lo - start, hi - lo)))
            lo, hi = window.shared(ways, peer, me)
            if hi > lo:
                parts.append((peer, x.new_empty(_resized(x.shape, dim, hi - lo))))
        _exchange(sends, parts, window.most_sent(ways) * _row_bytes(x, dim), axis, mesh)
        return torch.cat([part for _, part in parts], dim) if parts else x.new_empty(_resized(x.shape, dim, 0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, window = grads[0], ctx.window
        ways, me = ctx.mesh.sizes[ctx.axis], ctx.mesh.coord[ctx.axis]
        start, needed = chunk(window.size, ways, me)[0], window.needs(ways, me)[0]
        sends: list[Parcel] = []
        back: list[Parcel] = []
        places: list[tuple[int, int]] = []
        for peer in range(ways):
            lo, hi = window.shared(ways, peer, me)
            if hi > lo:
                sends.append((peer, grad.narrow(ctx.dim, lo - needed, hi - lo)))
            lo, hi = window.shared(ways, me, peer)
            if hi > lo:
                back.append((peer, grad.new_empty(_resized(ctx.shape, ctx.dim, hi - lo))))
                places.append((lo - start, hi - lo))
        _exchange(sends, back, window.most_received(ways) * _row_bytes(grad, ctx.dim), ctx.axis, ctx.mesh)
        dx = grad.new_zeros(ctx.shape)
        for (_, part), place in zip(back, places, strict=True):
            dx.narrow(ctx.dim, *place).add_(part)
        return dx, None, None, None, None


def _exchange(sends: list[Parcel], receives: list[Parcel], nbytes: int, axis: int, mesh: Mesh) -> None:
    """Send and receive; counted are the bytes of the rank that sends most."""
    record("send", axis, nbytes, "halo")
    start_transfers(sends, receives, axis, mesh)()


def _resized(shape: torch.Size, dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _row_bytes(x: Tensor, dim: int) -> int:
    return math.prod(_resized(x.shape, dim, 1)) * x.element_size()
