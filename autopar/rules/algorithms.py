"""Splits that need more than the plain operator on shards: what the runtime runs inside them, for prices and counts.

    embedding       rows of other ranks are masked to zero: nothing is sent
    cross_entropy   two all-reduces of one number per row: the maximum and the sum of exponentials
    causal_rows     queries are a chunk of rows, keys and values whole and cut to what the rows may see: nothing is sent
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layout import fraction
from autopar.rules.language import Option, Tensor


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`forward` and `backward` list the inner collectives; each moves one number per row of operand `rows` (its dims but the
    last), `itemsize` bytes each."""

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    rows: int = 0
    itemsize: int = 4

    def kinds(self, *, training: bool) -> tuple[str, ...]:
        """The inner collectives of one call, backward included when training."""
        return (*self.forward, *(self.backward if training else ()))

    def row_bytes(self, operands: Sequence[Tensor], options: Sequence[Option], sizes: tuple[int, ...]) -> float:
        """Bytes that one inner collective moves on one rank."""
        tensor = operands[self.rows]
        layout = tuple(o.ins[self.rows].value for o in options)
        last = f"S{len(tensor.shape) - 1}"
        rows = tuple("R" if e.startswith(last) else e for e in layout)
        return math.prod(tensor.sizes[:-1]) * fraction(rows, sizes) * self.itemsize


ALGORITHMS: dict[str, Algorithm] = {
    "causal_rows": Algorithm(),
    "cross_entropy": Algorithm(forward=("all_reduce",) * 2),
    "embedding": Algorithm(),
}
