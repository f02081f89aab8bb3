"""Executing the steps of a layout change on local tensors. No autograd here; see reshard.py.

The steps come from `layout.steps`, the same function that the cost model prices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar.layout import Layout, Step, dim_of, local_shape, steps
from autopar.runtime.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.runtime.count import counting, record
from autopar.runtime.cuts import check_shape, cut, join, pad, take
from autopar.runtime.mesh import Mesh

Shape = tuple[int, ...]


def relayout(x: Tensor, src: Layout, dst: Layout, shape: Shape, mesh: Mesh, name: str = "") -> Tensor:
    """`x`, this rank's part under `src` of a tensor of global `shape`, as it lies under `dst`.

    May return `x` itself or a view of it. Raises RunError where `x` has another shape than `src` says, LayoutError
    where no steps lead from `src` to `dst`.
    """
    check_shape(x, src, shape, mesh.sizes, mesh.coord, f"reshard {name}".rstrip())
    for step in steps(src, dst, mesh.sizes):
        if counting():
            record(step.kind, step.axis, step_bytes(step, shape, x.element_size(), mesh), name)
        if mesh.sizes[step.axis] > 1:
            x = _RUN[step.kind](x, step, shape, mesh)
    return x


def step_bytes(step: Step, shape: Shape, itemsize: int, mesh: Mesh) -> int:
    """Bytes of the tensor as one rank would hold it without the cut on the step's axis (see count.Counted)."""
    layout = (*step.before[:step.axis], "R", *step.before[step.axis + 1:])
    return torch.Size(local_shape(shape, layout, mesh.sizes, mesh.coord)).numel() * itemsize


def _gather(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    dim = dim_of(step.before[step.axis])
    how = cut(shape[dim], step.after, step.before, dim, step.axis, mesh.sizes, mesh.coord)
    if how.even and dim == 0:
        return all_gather(x, step.axis, mesh).flatten(0, 1)
    parts = all_gather(pad(x, dim, max(how.lengths)), step.axis, mesh)
    return join(parts.unbind(0), dim, how)


def _reduce(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    return all_reduce(x, step.axis, mesh, step.before[step.axis])


def _scatter(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    dim = dim_of(step.after[step.axis])
    how = cut(shape[dim], step.before, step.after, dim, step.axis, mesh.sizes, mesh.coord)
    if how.even and dim == 0:
        return reduce_scatter(x.unflatten(0, (mesh.sizes[step.axis], -1)), step.axis, mesh)
    length = max(how.lengths)
    parts = torch.stack([pad(take(x, dim, ranges), dim, length) for ranges in how.ranges])
    return reduce_scatter(parts, step.axis, mesh).narrow(dim, 0, how.lengths[mesh.coord[step.axis]])


def _exchange(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    old, new = dim_of(step.before[step.axis]), dim_of(step.after[step.axis])
    send = cut(shape[new], step.before, step.after, new, step.axis, mesh.sizes, mesh.coord)
    receive = cut(shape[old], step.after, step.before, old, step.axis, mesh.sizes, mesh.coord)
    mine = send.lengths[mesh.coord[step.axis]]
    shapes = []
    for length in receive.lengths:
        got = list(x.shape)
        got[old], got[new] = length, mine
        shapes.append(tuple(got))
    parts = all_to_all([take(x, new, ranges) for ranges in send.ranges], shapes, step.axis, mesh)
    return join(parts, old, receive)


def _slice(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    dim = dim_of(step.after[step.axis])
    how = cut(shape[dim], step.before, step.after, dim, step.axis, mesh.sizes, mesh.coord)
    return take(x, dim, how.ranges[mesh.coord[step.axis]])


def _mask(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    return x if mesh.coord[step.axis] == 0 else torch.zeros_like(x)



_RUN: dict[str, Callable[[Tensor, Step, Shape, Mesh], Tensor]] = {
    "all_gather": _gather,
    "all_reduce": _reduce,
    "all_to_all": _exchange,
    "mask": _mask,
    "reduce_scatter": _scatter,
    "slice": _slice,
}
