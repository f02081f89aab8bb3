"""Products with a weight, and lookups in a table, that is too large to gather whole: it is gathered, used and let go in
tiles, forward and backward.

On n ranks that have o/n rows of `weight [o, i]` each, tile j of t is rows j o/(n t) ... (j + 1) o/(n t) of every rank's
shard: an all-gather of contiguous memory, and every n t-th run of rows of the whole. The next tile is on its way while
one is used. The backward gathers each again where the gradient of x needs it, and scatters the gradient of each, while
that of the next is made. At most two tiles and the whole gradient of one are there at once. (Memory-centric tiling:
https://arxiv.org/abs/2104.07857, section 5.1.3; there tiles are modules of their own.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.errors import RunError
from autopar.runtime.algorithms.partial_attention import wide
from autopar.runtime.collectives import start_all_gather, start_reduce_scatter
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh


def tiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiles: int, axes: Sequence[int], mesh: Mesh
) -> Tensor:
    """F.linear: `x [..., i]` this rank's rows, `weight [o/n, i]` its part of the weight, `bias [o]` whole -> `[...,
    o]`.

    The gradient of `weight` comes back summed over the n ranks of the one axis in `axes`, this rank's part; that of
    `bias` partial. Raises RunError where `weight` does not divide into `tiles` or several axes cut it.
    """
    out: Tensor = _Linear.apply(x, weight, bias, _tiling(weight, tiles, axes, mesh, "tiled_linear"))
    return out


def tiled_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiles: int, axes: Sequence[int], mesh: Mesh
) -> Tensor:
    """torch.matmul, and a bias: `x [..., i]` this rank's rows, `weight [i/n, o]` its part of the weight, `bias [o]`
    whole -> `[..., o]`. As `tiled_linear` else."""
    out: Tensor = _Matmul.apply(x, weight, bias, _tiling(weight, tiles, axes, mesh, "tiled_matmul"))
    return out


def tiled_embedding(
    ids: Tensor, weight: Tensor, padding_idx: int = -1, *, tiles: int, axes: Sequence[int], mesh: Mesh
) -> Tensor:
    """F.embedding: `ids [...]` this rank's, of all v rows, `weight [v/n, h]` its part of the table -> `[..., h]`. Row
    `padding_idx` (-1: none) gets no gradient. As `tiled_linear` else."""
    out: Tensor = _Embedding.apply(ids, weight, padding_idx, _tiling(weight, tiles, axes, mesh, "tiled_embedding"))
    return out


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How one weight is gathered; its gradient is summed in `sums`."""

    count: int
    axis: int
    mesh: Mesh
    name: str
    sums: torch.dtype

    @property
    def ways(self) -> int:
        return self.mesh.sizes[self.axis]

    def gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Begin to gather the tile that `part` is this rank's rows of."""
        record("all_gather", self.axis, part.numel() * part.element_size() * self.ways, self.name)
        return start_all_gather(part, self.axis, self.mesh)

    def scatter(self, grad: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Begin to sum the whole gradient of a tile over the ranks, this rank's part into `out`."""
        grad = grad.to(self.sums).unflatten(0, (self.ways, -1))
        record("reduce_scatter", self.axis, grad.numel() * grad.element_size(), self.name)
        return start_reduce_scatter(grad, self.axis, self.mesh, out)

    def rows(self, ids: Tensor, each: int) -> tuple[Tensor, Tensor]:
        """The tile that each row of the whole is in, and its place there, where a rank has `each` rows of a tile."""
        owner, own = ids // (each * self.count), ids % (each * self.count)
        return own // each, owner * each + own % each

    def columns(self, x: Tensor) -> Tensor:
        """`x [..., o]` by the tile that its columns belong to: `[..., n, tiles, o/(n tiles)]`."""
        return x.unflatten(-1, (self.ways, self.count, -1))


def _tiling(weight: Tensor, tiles: int, axes: Sequence[int], mesh: Mesh, name: str) -> _Tiling:
    if len(axes) != 1:
        raise RunError(f"{name} gathers along one mesh axis, got {tuple(axes)} of {mesh}; plan it for one axis")
    if tiles < 1 or weight.shape[0] % tiles:
        raise RunError(
            f"{name}: {tiles} tiles do not divide the {weight.shape[0]} rows that a rank has of the weight "
            f"{tuple(weight.shape)}"
        )
    sums = weight.grad_dtype if weight.is_leaf and weight.requires_grad else None
    return _Tiling(tiles, axes[0], mesh, name, sums or weight.dtype)


class _Gathered:
    """The tiles of a weight, one after the other, the next one on its way; this keeps none that was taken."""

    def __init__(self, how: _Tiling, shard: Tensor) -> None:
        self.how, self.parts, self.begun = how, shard.detach().unflatten(0, (how.count, -1)), 1
        self.coming: Callable[[], Tensor] | None = how.gather(self.parts[0])

    def take(self) -> Tensor:
        """The next tile `[n o/(n tiles), i]`. Take it when the one before is let go."""
        assert self.coming is not None, "there is no further tile"
        tile, self.coming = self.coming(), None
        if self.begun < self.how.count:
            self.coming = self.how.gather(self.parts[self.begun])
            self.begun += 1
        return tile.flatten(0, 1)


class _Scattered:
    """This rank's part of a weight's gradient, tile by tile: the sum of one is on its way while the next is made."""

    def __init__(self, how: _Tiling, shard: Tensor) -> None:
        self.how, self.grad = how, torch.empty(shard.shape, dtype=how.sums, device=shard.device)
        self.parts, self.done = self.grad.unflatten(0, (how.count, -1)), 0
        self.finish: Callable[[], Tensor] | None = None

    def wait(self) -> None:
        """The tile before is summed and let go: call it before the next is made."""
        if self.finish is not None:
            self.finish()
            self.finish = None

    def add(self, grad: Tensor) -> None:
        """The whole gradient of the next tile."""
        self.finish = self.how.scatter(grad, self.parts[self.done])
        self.done += 1

    def all(self) -> Tensor:
        """The gradient of the shard."""
        self.wait()
        return self.grad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, bias: Tensor | None, how: _Tiling) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.how = how
        out = x.new_empty((*x.shape[:-1], shard.shape[0] * how.ways))
        columns, biases = how.columns(out), None if bias is None else how.columns(bias)
        tiles = _Gathered(how, shard)
        for number in range(how.count):
            part = None if biases is None else biases[..., number, :].flatten()
            columns[..., number, :] = F.linear(x, tiles.take(), part).unflatten(-1, (how.ways, -1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, shard = ctx.saved_tensors
        how: _Tiling = ctx.how
        columns, rows, total = how.columns(grads[0]), x.flatten(0, -2).conj(), None
        sums = _Scattered(how, shard) if ctx.needs_input_grad[1] else None
        tiles = _Gathered(how, shard) if ctx.needs_input_grad[0] else None
        for number in range(how.count):
            grad = columns[..., number, :].flatten(-2)
            if tiles is not None:
                part = grad @ tiles.take().conj()
                total = part.to(wide(part.dtype)) if total is None else total.add_(part)
                del part
            if sums is not None:
                sums.wait()
                sums.add(grad.flatten(0, -2).T @ rows)
        bias = grads[0].flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return None if total is None else total.to(x.dtype), None if sums is None else sums.all(), bias, None


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, bias: Tensor | None, how: _Tiling) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.how = how
        columns, tiles, total = how.columns(x), _Gathered(how, shard), None
        for number in range(how.count):
            part = columns[..., number, :].flatten(-2) @ tiles.take()
            total = part.to(wide(part.dtype)) if total is None else total.add_(part)
            del part
        assert total is not None, "at least one tile"
        if bias is not None:
            total.add_(bias)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, shard = ctx.saved_tensors
        how: _Tiling = ctx.how
        columns, rows = how.columns(x), grads[0].flatten(0, -2)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        sums = _Scattered(how, shard) if ctx.needs_input_grad[1] else None
        tiles = _Gathered(how, shard) if grad_x is not None else None
        for number in range(how.count):
            if grad_x is not None and tiles is not None:
                how.columns(grad_x)[..., number, :] = (grads[0] @ tiles.take().mH).unflatten(-1, (how.ways, -1))
            if sums is not None:
                sums.wait()
                sums.add(columns[..., number, :].flatten(-2).flatten(0, -2).mH @ rows)
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None if sums is None else sums.all(), bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, shard: Tensor, padding: int, how: _Tiling) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.how, ctx.padding, ctx.shard = how, padding, shard.detach()
        tiles, out = _Gathered(how, shard), shard.new_zeros((*ids.shape, shard.shape[1]))
        tile_of, place = how.rows(ids, shard.shape[0] // how.count)
        for number in range(how.count):
            here = tile_of == number
            rows = F.embedding(place.where(here, 0), tiles.take())
            torch.where(here.unsqueeze(-1), rows, out, out=out)
            del rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), how, shard = ctx.saved_tensors, ctx.how, ctx.shard
        each = shard.shape[0] // how.count
        tile_of, place = how.rows(ids, each)
        sums = _Scattered(how, shard)
        for number in range(how.count):
            here = (tile_of == number) & (ids != ctx.padding)
            grad = grads[0] * here.unsqueeze(-1)
            sums.wait()
            sums.add(torch.ops.aten.embedding_dense_backward(grad, place.where(here, 0), each * how.ways, -1, False))
        return None, sums.all(), None, None
