"""One call of an operator on one rank, as far as bytes depend on it: what algorithms send, and what big operators hold inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.layout import fraction
from autopar.rules.language import Option, Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """`options` and `sizes` have one entry per mesh axis; `axis` is the one that a collective runs on."""

    operands: Sequence[Tensor]
    options: Sequence[Option]
    sizes: tuple[int, ...]
    axis: int = 0

    def local(self, operand: int, *dims: int) -> float:
        """The product of the sizes that the named dims of an operand have on one rank."""
        kept = tuple(f"S{d}" for d in dims)
        layout = tuple(o.ins[operand].value for o in self.options)
        layout = tuple(e if e.partition("/")[0] in kept else "R" for e in layout)
        return math.prod(self.operands[operand].sizes[d] for d in dims) * fraction(layout, self.sizes)


@dataclass(frozen=True, slots=True)
class Inner:
    """One collective inside an algorithm: its kind, and the bytes that it moves as autopar.cost.comm.collective_s counts them."""

    kind: str
    nbytes: Callable[[Site], float]


@dataclass(frozen=True, slots=True)
class Inside:
    """Of an operator that is many steps at once, on one rank: bytes that its backward keeps, and bytes that its forward reads and
    writes, both beside operands and outputs."""

    kept_bytes: Callable[[Site], float]
    moved_bytes: Callable[[Site], float]
