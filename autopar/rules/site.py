"""One call of an operator on one rank, with what its bytes depend on (`Site`), and what runs inside it
(`InnerCollective`, `Inside`). The rows of rules.algorithms are made of these; cost and problem price them."""

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
    """A call with its options, on one rank.

    `options` and `sizes` have one entry per mesh axis; `axis` is the one on which a collective runs. `call` has the
    arguments that are no tensors. `wider` is the bytes of an element of a weight's summed gradient over those of an
    element of the weight. `in_a_row`: the experts of a token have neighbouring numbers."""

    operands: Sequence[Tensor]
    options: Sequence[Option]
    sizes: tuple[int, ...]
    axis: int = 0
    call: Call | None = None
    wider: float = 1.0
    in_a_row: bool = False

    @property
    def ways(self) -> int:
        """The number of ranks of the axis."""
        return self.sizes[self.axis]

    def argument(self, name: str) -> Any:
        """An argument of the call of an ATen overload, by name."""
        assert self.call is not None, f"{name} of a call that is not there"
        return given(self.call)[name]

    def local_bytes(self, *operands: int) -> float:
        """Bytes of the operands' shards on one rank."""
        return sum(self.local(i, *range(len(self.operands[i].shape))) * self.operands[i].itemsize for i in operands)

    def even(self, operand: int) -> bool:
        """Whether all ranks have shards of the same size of an operand."""
        return even(self.operands[operand].sizes, tuple(o.ins[operand].value for o in self.options), self.sizes)

    def local(self, operand: int, *dims: int) -> float:
        """The product of the local sizes of `dims` of an operand: whole sizes times the share that a rank has by the
        cuts of these dims. Not an integer where a cut is uneven."""
        kept = tuple(f"S{d}" for d in dims)
        layout = tuple(o.ins[operand].value for o in self.options)
        layout = tuple(e if e.partition("/")[0] in kept else "R" for e in layout)
        return math.prod(self.operands[operand].sizes[d] for d in dims) * fraction(layout, self.sizes)


def once(site: Site) -> int:
    """The constant 1: as `InnerCollective.times` a collective that runs once, as `Algorithm.pace` even work, as
    `InnerCollective.apart` no saving."""
    return 1


def everywhere(site: Site, parts: int) -> float:
    """The constant 1, as `InnerCollective.reached`: every row goes to one part of an axis."""
    return 1.0


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """One collective inside an algorithm: its kind, and the bytes that it moves as `autopar.cost.comm.collective_s`
    counts them.

    It runs `times` times, one after the other. A `hidden` one overlaps the operator's own work, on `times` of `times +
    1` equal parts of the work of that direction. One that is not hidden is waited for before the work begins, or after
    its end where it is `last`. `reorders`: it only brings rows into the order that the algorithm works in, or back.

    `parts` gives, by mesh axis, the axes along which all ranks have the same rows to send, so that each could send a
    part of them: the bytes that must then be gathered along that axis afterwards.

    `reached(site, parts)` is the mean number of parts that a row goes to, where the axis is divided into so many equal
    parts. `apart` is the factor on the bytes where software sends a row once to each of its readers in a part, and not
    once to the part."""

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
    """For an operator that consists of many kernels, bytes on one rank in addition to operands and outputs:
    `kept_bytes` that its backward keeps, `moved_bytes` that its forward reads and writes."""

    kept_bytes: Callable[[Site], float]
    moved_bytes: Callable[[Site], float]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What an algorithm keeps for the backward on one rank, in place of what the plain operator keeps: tensors of the
    call (numbers of operands, then results), `given` as they are and `copied` in tensors of its own; and `own_bytes`
    in addition."""

    given: tuple[int, ...]
    copied: tuple[int, ...]
    own_bytes: float
