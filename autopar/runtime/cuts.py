"""Where the pieces of one layout lie inside those of another: plain ints, computed once per shape and cached.

A *range* is `[start, stop)` in the coordinates of a local tensor. Exact for uneven chunks, empty shards and sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.errors import RunError
from autopar.layout import Layout, Step, dim_of, local_shape, pieces
from autopar.runtime.mesh import Mesh
from autopar.window_rows import Range


@dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks of one axis share one dim of a local tensor: `ranges[c]` are those of coordinate c."""

    ranges: tuple[tuple[Range, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """How much of the dim each rank has."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def even(self) -> bool:
        """Whether the ranks have equal parts, side by side in rank order."""
        step = self.ranges[0][0][1] if self.ranges[0] else 0
        return all(r == ((c * step, (c + 1) * step),) for c, r in enumerate(self.ranges))


def parting(step: Step, shape: Sequence[int], mesh: Mesh) -> Cut:
    """How a step that cuts a dim shares what this rank holds of it before; `shape` is that of the whole tensor."""
    return cut(shape[dim_of(step.after[step.axis])], step.before, step.after, step.axis, mesh.sizes, mesh.coord)


def joining(step: Step, shape: Sequence[int], mesh: Mesh) -> Cut:
    """How what this rank holds of a dim after a step that joins its parts is shared before."""
    return cut(shape[dim_of(step.before[step.axis])], step.after, step.before, step.axis, mesh.sizes, mesh.coord)


@lru_cache(maxsize=65536)
def cut(size: int, coarse: Layout, fine: Layout, axis: int, sizes: tuple[int, ...], coord: tuple[int, ...]) -> Cut:
    """How `fine`, which cuts a dim of `size` on `axis` as well, shares what the rank at `coord` holds of that dim under
    `coarse`."""
    dim = dim_of(fine[axis])
    outer = pieces(size, coarse, dim, sizes, coord)
    found = []
    for c in range(sizes[axis]):
        there = (*coord[:axis], c, *coord[axis + 1 :])
        found.append(_inside(pieces(size, fine, dim, sizes, there), outer))
    return Cut(tuple(found))


def _inside(fine: Sequence[Range], coarse: Sequence[Range]) -> tuple[Range, ...]:
    """`fine` in local coordinates of `coarse`, neighbours joined, empty ones dropped."""
    out: list[Range] = []
    for start, stop in fine:
        offset = 0
        for lo, hi in coarse:
            if start < stop and lo <= start and stop <= hi:
                here = (offset + start - lo, offset + stop - lo)
                if out and out[-1][1] == here[0]:
                    here = (out.pop()[0], here[1])
                out.append(here)
                break
            offset += hi - lo
    return tuple(out)


def take(x: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """The given ranges of `dim`, joined; a view where they are one."""
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    if not ranges:
        return x.narrow(dim, 0, 0)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def join(parts: Sequence[Tensor], dim: int, how: Cut, out: Tensor | None = None) -> Tensor:
    """The inverse of `take` on all ranks: put what rank c has, `parts[c]` (perhaps padded), where it belongs; in `out`,
    where that is given."""
    placed: list[tuple[int, Tensor]] = []
    for part, ranges in zip(parts, how.ranges, strict=True):
        offset = 0
        for start, stop in ranges:
            placed.append((start, part.narrow(dim, offset, stop - start)))
            offset += stop - start
    placed.sort(key=lambda item: item[0])
    if not placed:
        return parts[0].narrow(dim, 0, 0)
    if out is not None:
        return torch.cat([part for _, part in placed], dim, out=out)
    return torch.cat([part for _, part in placed], dim) if len(placed) > 1 else placed[0][1]


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` with zeros behind it so that `dim` is `length` long."""
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def own(full: Tensor, layout: Layout, sizes: tuple[int, ...], coord: tuple[int, ...]) -> Tensor:
    """What the rank at `coord` holds of the whole tensor `full` under a layout without partial entries."""
    for dim, size in enumerate(full.shape):
        full = take(full, dim, _inside(pieces(size, layout, dim, sizes, coord), [(0, size)]))
    return full


def check_shape(
    x: Tensor, layout: Layout, shape: Sequence[int], sizes: tuple[int, ...], coord: tuple[int, ...], what: str
) -> None:
    """Raises RunError unless `x` is this rank's part of a tensor of `shape` under `layout`."""
    wanted = local_shape(shape, layout, sizes, coord)
    if tuple(x.shape) != wanted:
        raise RunError(
            f"{what}: the rank at {coord} has a tensor of shape {tuple(x.shape)}, wanted {wanted}, its part of "
            f"{tuple(shape)} under layout {','.join(layout)}"
        )
