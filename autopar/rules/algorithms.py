"""Splits that need more than the plain operator on shards: what the runtime runs inside them, for prices and counts.

    embedding       rows of other ranks are masked to zero: nothing is sent
    cross_entropy   two all-reduces of one number per row: the maximum and the sum of exponentials
    causal_rows     queries are a chunk of rows, keys and values whole and cut to what the rows may see: nothing is sent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.layout import fraction
from autopar.rules.language import Option, Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """One call of an algorithm, as far as the size of what it moves depends on it.

    `options` and `sizes` have one entry per mesh axis; `axis` is the one that the collective runs on. `itemsize` is the bytes of
    one element of the operator's first output.
    """

    operands: Sequence[Tensor]
    options: Sequence[Option]
    sizes: tuple[int, ...]
    axis: int
    itemsize: int

    def local_numel(self, operand: int, *, dims: int) -> float:
        """Elements of the first `dims` dims of an operand on one rank."""
        tensor = self.operands[operand]
        kept = tuple(f"S{d}" for d in range(dims))
        layout = tuple(o.ins[operand].value for o in self.options)
        layout = tuple(e if e.partition("/")[0] in kept else "R" for e in layout)
        return math.prod(tensor.sizes[:dims]) * fraction(layout, self.sizes)


@dataclass(frozen=True, slots=True)
class Inner:
    """One collective inside an algorithm: its kind, and the bytes that it moves as autopar.cost.comm.collective_s counts them."""

    kind: str
    nbytes: Callable[[Site], float]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The inner collectives of one call, forward and backward, in the order in which they run."""

    forward: tuple[Inner, ...] = ()
    backward: tuple[Inner, ...] = ()

    def inner(self, *, training: bool) -> tuple[Inner, ...]:
        """The inner collectives of one call, backward included when training."""
        return (*self.forward, *(self.backward if training else ()))


def _statistic(site: Site) -> float:
    """One number per row of operand 0, at least a float32."""
    return site.local_numel(0, dims=len(site.operands[0].shape) - 1) * max(4, site.itemsize)


ALGORITHMS: dict[str, Algorithm] = {
    "causal_rows": Algorithm(),
    "cross_entropy": Algorithm(forward=(Inner("all_reduce", _statistic),) * 2),
    "embedding": Algorithm(),
}
