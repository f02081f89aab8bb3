"""Raw collectives along one mesh axis, on tensors whose cut dim is the first. No autograd, no layouts.

All are exact for every dtype: booleans, which the backends reduce each in its own way, travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.mesh import Mesh

# torch 2.13 renamed the two and warns at every call of the old names; 2.11 has the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPS = {"P": dist.ReduceOp.SUM, "Pmax": dist.ReduceOp.MAX, "Pmin": dist.ReduceOp.MIN}


def all_reduce(x: Tensor, axis: int, mesh: Mesh, entry: str = "P") -> Tensor:
    """The sum ("P"), maximum ("Pmax") or minimum ("Pmin") over the ranks of `axis`: a new tensor of x's shape.

    A sum of booleans is their "or".
    """
    if mesh.sizes[axis] == 1:
        return x
    if x.dtype == torch.bool:
        return all_reduce(x.to(torch.uint8), axis, mesh, "Pmax" if entry == "P" else entry).to(torch.bool)
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, OPS[entry], group=mesh.group(axis))
    return out


def broadcast(x: Tensor, source: int, axis: int, mesh: Mesh) -> Tensor:
    """What coordinate `source` of `axis` has, on all its ranks; `x` says shape and dtype elsewhere and may be overwritten there."""
    out = x.contiguous()
    dist.broadcast(out.view(torch.uint8) if out.dtype == torch.bool else out, group=mesh.group(axis), group_src=source)
    return out


def all_gather(x: Tensor, axis: int, mesh: Mesh) -> Tensor:
    """`[m, ...]` on each of n ranks -> `[n, m, ...]`; m must be the same on all."""
    return start_all_gather(x, axis, mesh)()


def start_all_gather(x: Tensor, axis: int, mesh: Mesh) -> Callable[[], Tensor]:
    """`all_gather` in the background; the result comes from calling what this returns. `x` must not change until then."""
    x = x.contiguous()
    out = x.new_empty((mesh.sizes[axis] * x.shape[0], *x.shape[1:]))
    work = _all_gather(out, x, group=mesh.group(axis), async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return out.view(mesh.sizes[axis], *x.shape)

    return finish


def reduce_scatter(x: Tensor, axis: int, mesh: Mesh) -> Tensor:
    """The sum over ranks of part [i] of `[n, m, ...]`, on rank i of the axis: `[m, ...]`."""
    if x.dtype == torch.bool:
        return reduce_scatter(x.to(torch.int32), axis, mesh) > 0
    return start_reduce_scatter(x, axis, mesh)()


def start_reduce_scatter(x: Tensor, axis: int, mesh: Mesh, out: Tensor | None = None) -> Callable[[], Tensor]:
    """`reduce_scatter` in the background, into `out` where that is given; the result comes from calling what this returns. `x` must not
    change until then."""
    x = x.contiguous()
    out = x.new_empty(x.shape[1:]) if out is None else out
    work = _reduce_scatter(out, x.flatten(0, 1), group=mesh.group(axis), async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return out

    return finish


def all_to_all(parts: list[Tensor], shapes: list[tuple[int, ...]], axis: int, mesh: Mesh) -> list[Tensor]:
    """Send `parts[i]` to rank i of the axis; get the tensors of `shapes`, one from each."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    out = flat.new_empty(sum(sizes))
    dist.all_to_all_single(out, flat, sizes, [part.numel() for part in parts], group=mesh.group(axis))
    return [got.view(shape) for got, shape in zip(out.split(sizes), shapes, strict=True)]
