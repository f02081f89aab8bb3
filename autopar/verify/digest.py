"""What the search for the first difference keeps of a value: sums along one dim, with random weights.

Kept whole, the values and gradients of a model take many times the memory of its step. Their sums are smaller by the
length of the longest dim, and linear, so that a rank makes those of its own part without the others: along a dim that
is cut they are parts of a sum. A wrong number changes its sum by half of the error or more; that several errors cancel
takes weights that nobody chose so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.layout import Layout, dim_of, is_placed, is_shard, pieces
from autopar.plan import Plan
from autopar.runtime.cuts import take
from autopar.tensors import as_real
from autopar.verify.compare import CHUNK

STRANGE = 1e30
"""From this size on numbers are marks, as those that masks put in: their sums would hide all others."""


class Digest(NamedTuple):
    """This rank's part of the sums of a value, how it lies, and their whole shape."""

    local: Tensor
    layout: Layout
    shape: tuple[int, ...]


def micro_entry(plan: Plan, name: str) -> str:
    """How microbatches share the value of that name, `node` or `node:output`; R for a node that the plan does not have,
    which is not compared (one output of another node)."""
    node, _, index = name.partition(":")
    shared = plan.nodes[node].micro if node in plan.nodes else ()
    return shared[int(index or 0)] if shared else "R"


def micro_dim(plan: Plan, name: str) -> int | None:
    """The dim of that value that microbatches cut, if they do."""
    entry = micro_entry(plan, name)
    return dim_of(entry) if is_shard(entry) else None


def summed_dim(shape: Sequence[int], kept: int | None) -> int | None:
    """The dim along which a value of `shape` is summed: the longest but `kept`, the one that microbatches cut. None
    where there is no other."""
    dims = [dim for dim in range(len(shape)) if dim != kept]
    return max(dims, key=lambda dim: (shape[dim], dim)) if dims else None


def whole(value: Tensor, kept: int | None) -> Tensor:
    """The sums of a whole value."""
    dim = summed_dim(value.shape, kept)
    return _sums(value, dim, None if dim is None else _weights(value.shape[dim]))


def local(
    value: Tensor, layout: Layout, shape: tuple[int, ...], kept: int | None, sizes: Sequence[int], coord: Sequence[int]
) -> Digest:
    """Those of this rank's part of a value of `shape`. No maximum over ranks (Pmax): of that there are no sums."""
    dim = summed_dim(shape, kept)
    of_parts = (2,) if value.is_complex() else ()
    if dim is None:
        return Digest(_sums(value, None, None), layout, (*shape, *of_parts))
    weights = take(_weights(shape[dim]), 0, pieces(shape[dim], layout, dim, sizes, coord))
    after = tuple("P" if _lies_along(entry, dim) else entry for entry in layout)
    return Digest(_sums(value, dim, weights), after, (*shape[:dim], 1, *shape[dim + 1 :], *of_parts))


def _lies_along(entry: str, dim: int) -> bool:
    """Whether a rank has a part of `dim` alone under this entry of a layout."""
    return dim_of(entry) == dim if is_shard(entry) else is_placed(entry) and dim == 0


def _sums(value: Tensor, dim: int | None, weights: Tensor | None) -> Tensor:
    """The sums of `value` along `dim`, which stays with size 1, in float64; complex numbers as both of their parts."""
    value = as_real(value.detach())
    if dim is None or weights is None:
        return _finite(value)
    across = [1] * value.dim()
    across[dim] = -1
    rows = max(1, CHUNK * value.shape[dim] // max(1, value.numel()))
    found = value.new_zeros([1 if d == dim else n for d, n in enumerate(value.shape)], dtype=torch.float64)
    for part, by in zip(value.split(rows, dim), weights.to(value.device).split(rows), strict=True):
        found += (_finite(part) * by.view(across)).sum(dim, keepdim=True)
    return found


def _finite(value: Tensor) -> Tensor:
    """A copy in float64 with marks, which are the same wherever they are equal, in place of numbers that are none or
    as good as infinite."""
    copy = value.to(torch.float64, copy=True)
    return (
        copy.masked_fill_(copy.isnan(), math.e)
        .masked_fill_(copy >= STRANGE, math.pi)
        .masked_fill_(copy <= -STRANGE, -math.pi)
    )


@lru_cache(maxsize=64)
def _weights(length: int) -> Tensor:
    """The weights of a dim of that length, the same in every process: 0.5 to 1.5, half of them negative."""
    generator = torch.Generator().manual_seed(length)
    sizes, signs = torch.rand(2, length, generator=generator, dtype=torch.float64)
    return (sizes + 0.5) * (signs - 0.5).sign()
