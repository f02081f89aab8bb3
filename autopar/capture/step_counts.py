"""Numbers that a model counts up from step to step (`self.steps += 1`), and values of them to try steps at. Used by
step_variation.

Whether any later step is another one cannot be known by running some. Two kinds of conditions are found: a threshold
(`self.steps > 1000`), since FAR is beyond all that are in use, and a step of every n (`self.steps % n == 0`), since FAR
is a multiple of every n up to 20 and of their products with powers of ten, and its neighbours of none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

FAR = math.lcm(*range(1, 21)) * 10_000
"""A count that no training reaches, which all usual periods divide."""

Count = tuple[str, str]
"""The path of a module, and the name of its attribute."""


def counts_of(model: nn.Module) -> dict[Count, float]:
    """The ints and floats among the attributes of all modules."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def later(counted: Sequence[Mapping[Count, float]]) -> Iterator[dict[Count, float]]:
    """Values, as of later steps, of the numbers that both of two steps have changed. `counted`: all numbers before the
    first step, between the two, and after the second.

    With each at FAR, and one step before and behind that, whether it is read before or after it is counted. A number
    that only the first step changes (the longest text so far) is no count.
    """
    first, between, last = counted
    which = [count for count, value in last.items() if first.get(count) != between.get(count) != value]
    for steps in (-1, 0, 1) if which else ():
        yield {count: FAR + steps * (last[count] - between.get(count, 0)) for count in which}


def put(model: nn.Module, values: Mapping[Count, float]) -> None:
    """Set numbers of a model."""
    for (path, name), value in values.items():
        setattr(model.get_submodule(path), name, value)
