"""How a parameter rests and how its readers see it.

    use on an axis   at rest  leaf   gradient
    R|R              R        R      R: summed over the axis once per step where readers leave partial sums (data
                                     parallelism)
    S0|S0            S0       S0     S0: readers that want it whole gather it at each use (ZeRO-3), others do not
                                     (tensor parallelism)
    R|S0             S0       R      readers leave partial sums, which are scattered to S0; the leaf is gathered once
                                     per step (ZeRO-1 and 2)

At *rest* is what the optimizer updates, so it lies as its gradient does; the *leaf* is what autograd computes with.
Where the two differ the leaf is made once per step, and its gradient is partial on that axis until it is scattered:
once per step, or with the run `EACH` after every microbatch (ZeRO-2), when no whole gradient stays. With one microbatch
the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layout import NO_GRAD, Layout, is_shard
from autopar.rules.language import Option

EACH = "each"
"""The run of a parameter whose gradient is scattered after every microbatch."""


@dataclass(frozen=True, slots=True)
class Resting:
    """The layouts of a parameter's leaf and of the parameter at rest, and whether its gradient is scattered after
    `each` microbatch."""

    leaf: Layout
    rest: Layout
    each: bool = False

    @staticmethod
    def of(options: Sequence[Option]) -> Resting:
        """From the options of a parameter, one per axis."""
        uses = [option.outs[0] for option in options]
        rest = tuple(use.value if use.grad == NO_GRAD else use.grad for use in uses)
        return Resting(tuple(use.value for use in uses), rest, any(option.run == EACH for option in options))

    @property
    def gathered(self) -> tuple[int, ...]:
        """The axes on which the leaf is whole and the rest is cut."""
        return gathered_axes(self.leaf, self.rest)


def gathered_axes(value: Layout, grad: Layout) -> tuple[int, ...]:
    """The axes on which a weight with these layouts of value and gradient is gathered once per step."""
    return tuple(axis for axis, (v, g) in enumerate(zip(value, grad, strict=True)) if v == "R" and is_shard(g))


def one_cadence(options: Sequence[Option]) -> bool:
    """Whether the options of a parameter, one per axis, agree on when its gradient is scattered."""
    return len({option.run for option in options if is_gathered(option)}) < 2


def is_gathered(option: Option) -> bool:
    """Whether under this option of a parameter its leaf is whole on the axis and the parameter rests cut."""
    return option.outs[0].value == "R" and is_shard(option.outs[0].grad)
