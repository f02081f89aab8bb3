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
    """What is done to a shard before it is gathered: a permutation of its dims (`dims` as for Tensor.permute; () for
    none), then casts to the dtypes `casts`, one after the other."""

    dims: tuple[int, ...] = ()
    casts: tuple[torch.dtype, ...] = ()

    def of(self, x: Tensor) -> Tensor:
        """`x` permuted and cast: `x` itself, a view of it, or with casts a new tensor."""
        x = x.permute(self.dims) if self.dims else x
        for dtype in self.casts:
            x = x.to(dtype)
        return x

    def summed(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """`grad`, the gradient of the result of `of`, in the dtype in which ranks sum it: `dtype`, which is that of the
        parameter's gradient; unchanged where there is a cast."""
        return grad if self.casts else grad.to(dtype)

    def back(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `x`, in `dtype`, from `grad`, the gradient of the result of `of`."""
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
