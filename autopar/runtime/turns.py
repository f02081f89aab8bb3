"""What is done to the shard of a weight before it is gathered: its dims are permuted, then it is cast.

It is done when the gather starts, so that gathers of a transposed or cast parameter can be prefetched like those of the
parameter itself, and are sent in the dtype of the cast. The backward applies the inverse to the reduce-scattered
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.layout import Layout


@dataclass(frozen=True, slots=True)
class Turn:
    """`dims` as Tensor.permute has them ((): as they are), then the dtypes of casts, one after the other."""

    dims: tuple[int, ...] = ()
    casts: tuple[torch.dtype, ...] = ()

    def of(self, x: Tensor) -> Tensor:
        """`x` turned: itself, a view of it, or where it is cast a new tensor."""
        x = x.permute(self.dims) if self.dims else x
        for dtype in self.casts:
            x = x.to(dtype)
        return x

    def summed(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of what `of` made as ranks sum it: in `dtype`, that of the parameter's own gradient; of a cast
        as the cast has it."""
        return grad if self.casts else grad.to(dtype)

    def back(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `x`, in `dtype`, from that of what `of` made of it."""
        for cast in reversed(self.casts[:-1]):
            grad = grad.to(cast)
        return (grad.permute(sorted(range(len(self.dims)), key=self.dims.__getitem__)) if self.dims else grad).to(dtype)


AS_IS = Turn()


@dataclass(frozen=True, slots=True)
class Gathered:
    """What is gathered of a shard as `turn` makes it: its global `shape`, and the layout `rest` to which its gradient
    is scattered."""

    turn: Turn
    shape: tuple[int, ...]
    rest: Layout
