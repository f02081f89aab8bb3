"""One call of an operator on one rank, as far as bytes depend on it: what algorithms send, and what big operators hold
inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.layout import even, fraction
from autopar.rules.arguments import given
from autopar.rules.language import Call, Option, Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """`options` and `sizes` have one entry per mesh axis; `axis` is the one that a collective runs on. `call` has what
    is no tensor. `wider`: an element of the sum of a weight's gradients has so many times the bytes of one of the
    weight. `in_a_row`: the experts of a token lie next to each other."""

    operands: Sequence[Tensor]
    options: Sequence[Option]
    sizes: tuple[int, ...]
    axis: int = 0
    call: Call | None = None
    wider: float = 1.0
    in_a_row: bool = False

    @property
    def ways(self) -> int:
        """How many ranks the axis has."""
        return self.sizes[self.axis]

    def argument(self, name: str) -> Any:
        """An argument of the call of an ATen overload."""
        assert self.call is not None, f"{name} of a call that is not there"
        return given(self.call)[name]

    def local_bytes(self, *operands: int) -> float:
        """Bytes of operands on one rank."""
        return sum(self.local(i, *range(len(self.operands[i].shape))) * self.operands[i].itemsize for i in operands)

    def even(self, operand: int) -> bool:
        """Whether all ranks have equal parts of an operand."""
        return even(self.operands[operand].sizes, tuple(o.ins[operand].value for o in self.options), self.sizes)

    def local(self, operand: int, *dims: int) -> float:
        """The product of the sizes that the named dims of an operand have on one rank."""
        kept = tuple(f"S{d}" for d in dims)
        layout = tuple(o.ins[operand].value for o in self.options)
        layout = tuple(e if e.partition("/")[0] in kept else "R" for e in layout)
        return math.prod(self.operands[operand].sizes[d] for d in dims) * fraction(layout, self.sizes)


def once(site: Site) -> int:
    """One time; an equal share."""
    return 1


def everywhere(site: Site, parts: int) -> float:
    """One of any number of parts."""
    return 1.0


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """One collective inside an algorithm: its kind, and the bytes that it moves as autopar.cost.comm.collective_s
    counts them.

    It runs `times` times, each after the other. A `hidden` one runs while the operator works, on `times` of `times + 1`
    equal pieces of what it does in that direction. `reorders`: it only brings rows into the order that the algorithm
    works in, or back. One that is not hidden is waited for: before the operator works, or behind it where it is `last`.
    `parts` are axes whose ranks all have what is sent, of which each could send a part by itself: by axis, the bytes
    that are then gathered there beside. Of so many equal parts of the axis a row goes to so many (`reached`); `apart`
    is how many times the bytes are where software sends it to each of its readers there.
    """

    kind: str
    nbytes: Callable[[Site], float]
    times: Callable[[Site], int] = once
    hidden: bool = False
    reorders: bool = False
    last: bool = False
    parts: Callable[[Site], Mapping[int, float]] = lambda site: {}
    reached: Callable[[Site, int], float] = everywhere
    apart: Callable[[Site], float] = once


@dataclass(frozen=True, slots=True)
class Inside:
    """Of an operator that is many steps at once, on one rank: bytes that its backward keeps, and bytes that its forward
    reads and writes, both beside operands and outputs."""

    kept_bytes: Callable[[Site], float]
    moved_bytes: Callable[[Site], float]
