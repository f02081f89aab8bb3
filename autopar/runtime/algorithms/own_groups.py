"""Grouped matmul on ranks that each have some of the groups: each computes the rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.mesh import Mesh


def own_groups(
    compute: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    ends: Tensor,
    *,
    groups: int,
    axes: Sequence[int],
    mesh: Mesh,
) -> Tensor:
    """`rows [n, k]` sorted by group, those of group i before `ends[i]`, `ends [groups]` -> `[n, m]`, a part of a sum
    over `axes`.

    `axes` cut the groups, major first; rows of the groups of others give 0. `compute(rows [n', k], ends [groups']) ->
    [n', m]` is this rank's groups. No communication; the gradient of `rows` is a part of a sum too. Where groups end is
    data, which the host reads.
    """
    start, stop = mesh.span(groups, axes)
    first = int(ends[start - 1]) if start else 0
    last = int(ends[stop - 1]) if stop > start else first
    return F.pad(compute(rows[first:last], ends[start:stop] - first), (0, 0, first, len(rows) - last))
