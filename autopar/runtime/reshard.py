"""`reshard`: a change of layout, with its gradient.

Forward runs `layout.steps(src, dst)`, backward `layout.steps(consumer's gradient, producer's gradient)`. In compiled
code it is the opaque operator `autopar::reshard`, so that the very same steps run, and are counted, there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.errors import LayoutError
from autopar.layout import Layout, absent, cutters, parse, sections_of
from autopar.runtime.first_order import only_first_order
from autopar.runtime.mesh import Mesh, mesh_number
from autopar.runtime.moves import relayout
from autopar.runtime.replay import once


def reshard(
    x: Tensor,
    change: str,
    *,
    grad: str | None,
    shape: Sequence[int],
    mesh: Mesh,
    name: str = "",
    sums: torch.dtype | None = None,
) -> Tensor:
    """This rank's part of a tensor of global `shape`, moved as `change` says: `"S0,R -> S0,S1"`.

    `grad` is the same for gradients, `"consumer's -> producer's"`, or None where none flows (integers, inference). In
    compiled code the gradient is moved in the dtype `sums`, where given; else in the leaf's `grad_dtype`. Exact for
    uneven and empty shards, sections, every dtype. Raises RunError where `x` is not shaped as its layout says.
    """
    if torch.compiler.is_compiling():
        moved: Tensor = torch.ops.autopar.reshard(x, change, grad, list(shape), mesh.number, name, sums)
        return moved
    src, dst = arrow(change)
    if grad is None or not x.requires_grad or not torch.is_grad_enabled():
        if src == dst:
            return x
        return once(lambda: relayout(x.detach(), src, dst, tuple(shape), mesh, name))
    back = arrow(grad)
    if src == dst and back[0] == back[1]:
        return x
    out: Tensor = _Reshard.apply(x, src, dst, back, tuple(shape), mesh, name)
    return out


@lru_cache(maxsize=4096)
def arrow(text: str) -> tuple[Layout, Layout]:
    """`"S0 -> R"` as two layouts. Raises LayoutError on anything else."""
    parts = text.split("->")
    if len(parts) != 2:
        raise LayoutError(f"{text!r} is no change of layout; expected two layouts and an arrow, as 'S0,R -> S0,S1'")
    return parse(parts[0].strip()), parse(parts[1].strip())


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        src: Layout,
        dst: Layout,
        back: tuple[Layout, Layout],
        shape: tuple[int, ...],
        mesh: Mesh,
        name: str,
    ) -> Tensor:
        ctx.back, ctx.shape, ctx.mesh, ctx.name = back, shape, mesh, name
        ctx.dtype = x.grad_dtype if x.is_leaf else None  # in which a parameter's gradients are summed and add up
        out = once(lambda: relayout(x, src, dst, shape, mesh, name))
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        src, dst = ctx.back
        if src != dst:
            only_first_order(ctx.name)
        grad = grads[0] if ctx.dtype is None else grads[0].to(ctx.dtype)
        moved = relayout(grad, src, dst, ctx.shape, ctx.mesh, ctx.name)
        return moved, None, None, None, None, None, None


@torch.library.custom_op("autopar::reshard", mutates_args=())
def _operator(
    x: Tensor, change: str, grad: str | None, shape: list[int], mesh: int, name: str, sums: torch.dtype | None
) -> Tensor:
    src, dst = arrow(change)
    out = relayout(x, src, dst, tuple(shape), mesh_number(mesh), name)
    return out.clone(memory_format=torch.contiguous_format)  # operators must not return a view of their input


@_operator.register_fake
def _fake(
    x: Tensor, change: str, grad: str | None, shape: list[int], mesh: int, name: str, sums: torch.dtype | None
) -> Tensor:
    layout = arrow(change)[1]
    return x.new_empty([_length(size, layout, dim, mesh_number(mesh)) for dim, size in enumerate(shape)])


def _length(size: int, layout: Layout, dim: int, mesh: Mesh) -> int:
    """As layout.local_shape, for one dim and for symbolic sizes as well."""
    if dim == 0 and absent(layout, mesh.coord):
        return 0
    axes = cutters(layout, dim)
    if axes and len(sections_of(layout[axes[0]])) > 1:
        return size // math.prod(mesh.sizes[axis] for axis in axes)
    return mesh.local(size, axes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.change, ctx.grad, ctx.shape, ctx.mesh, ctx.name, ctx.sums = inputs


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.grad is None:
        return (None,) * 7
    grad = grads[0] if ctx.sums is None else grads[0].to(ctx.sums)
    moved = torch.ops.autopar.reshard(grad, ctx.grad, None, ctx.shape, ctx.mesh, ctx.name, None)
    return moved.to(grads[0].dtype), *(None,) * 6  # in compiled code a gradient must have the dtype of its tensor


_operator.register_autograd(_backward, setup_context=_setup)
