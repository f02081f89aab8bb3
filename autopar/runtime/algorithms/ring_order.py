"""Which rows each rank of a ring works on, and which pairs of (own queries, keys of another rank) there are to compute.

Contiguous chunks balance an attention in which every row sees every key. Where row i sees keys 0 ... i the last rank
would do almost twice its share, so each rank works on two halves of chunks instead, one from the front and one from the
back ("zigzag"): of 2n halves, rank r takes r and 2n - 1 - r. The halves are exchanged on the way in and out; the graph
around sees contiguous chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autopar.layout import chunk
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh
from autopar.runtime.neighbours import Parcel, start_transfers

Dims = tuple[int, ...]
Tile = tuple[slice, slice, bool]  # own rows, rows of the other rank's keys, whether the pair is causal


@dataclass(frozen=True)
class Order:
    """The rows of a sequence of length `rows` on the ranks of `axis`; dim -2 of every tensor is the sequence."""

    rows: int
    axis: int
    mesh: Mesh
    causal: bool
    name: str = "ring_attention"

    @property
    def ways(self) -> int:
        """How many ranks there are."""
        return self.mesh.sizes[self.axis]

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return self.mesh.coord[self.axis]

    @cached_property
    def zigzag(self) -> bool:
        """Whether ranks work on two halves each: causal, and 2n halves of one length (autopar.rules.algorithms prices
        the same)."""
        return self.causal and self.ways > 1 and self.rows % (2 * self.ways) == 0

    def span(self, rank: int) -> tuple[int, int]:
        """`[start, stop)` of the contiguous chunk of `rank`."""
        return chunk(self.rows, self.ways, rank)

    def length(self, rank: int) -> int:
        """How many rows `rank` has."""
        start, stop = self.span(rank)
        return stop - start

    def tiles(self, source: int) -> list[Tile]:
        """What to compute of the own queries and the keys of `source`: nothing that is hidden."""
        every = slice(None)
        if not self.length(self.rank) or not self.length(source):
            return []
        if not self.causal or source == self.rank:
            return [(every, every, self.causal)]
        half = self.length(self.rank) // 2
        if source < self.rank:
            return [(every, slice(0, half) if self.zigzag else every, False)]
        return [(slice(half, None), every, False)] if self.zigzag else []

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous chunks -> the rows that this rank works on."""
        return self._exchange(tensors, self._workers, self._holders) if self.zigzag else list(tensors)

    def leave(self, tensors: Sequence[Tensor], like: Sequence[Dims]) -> list[Tensor]:
        """The inverse of `enter`; what it copies lies in memory as `like` says for each tensor (`dims_in_memory`)."""
        return self._exchange(tensors, self._holders, self._workers, like) if self.zigzag else list(tensors)

    @property
    def _workers(self) -> tuple[int, int]:
        """Who works on the two halves of this rank's chunk."""
        first, second = (
            half if half < self.ways else 2 * self.ways - 1 - half for half in (2 * self.rank, 2 * self.rank + 1)
        )
        return first, second

    @property
    def _holders(self) -> tuple[int, int]:
        """Whose chunks the two halves that this rank works on belong to."""
        return self.rank // 2, (2 * self.ways - 1 - self.rank) // 2

    def _exchange(
        self,
        tensors: Sequence[Tensor],
        to: tuple[int, int],
        origin: tuple[int, int],
        like: Sequence[Dims] | None = None,
    ) -> list[Tensor]:
        """Send the halves of each tensor to the two ranks `to`, get two from the ranks `origin`; between two ranks the
        earlier half goes first. What comes is contiguous, or lies in memory as `like` says."""
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        for x in tensors:
            halves = [part.contiguous() for part in x.chunk(2, -2)]
            sends += zip(to, halves, strict=True)
            receives += [(rank, torch.empty_like(part)) for rank, part in zip(origin, halves, strict=True)]
        record("send", self.axis, sum(x.numel() * x.element_size() for x in tensors), self.name)
        start_transfers(sends, receives, self.axis, self.mesh)()
        got = [x for _, x in receives]
        made = [
            torch.empty_permuted(x.shape, dims, dtype=x.dtype, device=x.device)
            for x, dims in zip(tensors, like or [tuple(range(x.dim())) for x in tensors], strict=True)
        ]
        return [torch.cat(got[2 * i : 2 * i + 2], -2, out=whole) for i, whole in enumerate(made)]


def dims_in_memory(x: Tensor) -> Dims:
    """The dims of a tensor from the one with the largest stride to that with the smallest."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
