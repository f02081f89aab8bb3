"""Grouped-query attention with more ranks than key heads: the query heads are cut, and each rank takes the key and
value heads of its own queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.mesh import Mesh


def own_heads(x: Tensor, *, heads: int, groups: int, axes: Sequence[int], within: Sequence[int], mesh: Mesh) -> Tensor:
    """`x [..., g, s, d]`, keys or values -> the heads of them that this rank's query heads attend to, `[..., h, s, d]`.

    `heads` query heads are cut by `axes`, major first; each of `groups` key heads serves heads / groups of them in a
    row. `x` has the chunk of the groups that the axes in `within` cut (all, where there are none). Where a chunk of
    queries is in one group, or is whole groups, `h` is their number and the result a view; else it has one head for
    each query head. No communication; the gradient of `x` is a part of a sum over `axes` without `within`.
    """
    start, stop = mesh.span(heads, axes)
    first, _ = mesh.span(groups, within)
    each = heads // groups
    held = slice(start // each - first, max(stop - 1, start) // each + 1 - first)
    if held.stop - held.start == 1 or (start % each == 0 and stop % each == 0):
        return x[..., held, :, :]
    numbers = torch.arange(start, stop, device=x.device) // each - first
    return x.index_select(-3, numbers)
