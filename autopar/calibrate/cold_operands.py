"""Operands and results as a step has them: what an operator reads was not just read, and what it writes is kept for the
backward.

An operator that is run over and over on the same tensors has them in the caches of its core; in a step other layers
come in between.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

COLD_BYTES = {"cpu": 1 << 25, "cuda": 0}
"""Bytes of other tensors that are used before a tensor is used again, by kind of device. None on GPUs, whose caches are
small against what their operators move."""

APART = 3
"""Other tensors that are used before a tensor is used again, at least."""

ALIGNED = 64
"""Elements at whose multiples tensors begin."""


class Cold:
    """Random tensors out of one large one, each time other ones; and results that are kept for a while."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.kind, self.dtype, self.limit = kind, dtype, COLD_BYTES[kind]
        self._pool = self._made(self.limit // dtype.itemsize)
        self._at = self._held = 0
        self._kept: deque[Tensor] = deque()

    def next(self, *shape: int) -> Tensor:
        """A tensor that was not used for a while."""
        elements = math.prod(shape)
        if APART * elements > len(self._pool):
            self._pool = self._made(APART * -(-elements // ALIGNED) * ALIGNED)
        if self._at + elements > len(self._pool):
            self._at = 0
        found = self._pool[self._at : self._at + elements].view(shape)
        self._at += -(-elements // ALIGNED) * ALIGNED
        return found

    def keep(self, result: Tensor) -> Tensor:
        """`result`, whose memory is not used again for a while."""
        self._kept.append(result)
        self._held += result.nbytes
        while self._held > self.limit and len(self._kept) > 1:
            self._held -= self._kept.popleft().nbytes
        return result

    def _made(self, elements: int) -> Tensor:
        return torch.randn(elements, device=self.kind).to(self.dtype)
