"""How a value and its gradient lie, as one thing: what is made, and what is asked for."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from autopar.layout import NO_GRAD, Layout, show
from autopar.problem.at_rest import gathered_axes
from autopar.rules.language import Use


class Pair(NamedTuple):
    """Layouts of a value and of its gradient; of a weight also whether its gradient is scattered after every microbatch."""

    value: Layout
    grad: Layout
    each: bool = False

    @property
    def back(self) -> Layout:
        """The gradient's layout, something harmless where there is none."""
        return tuple("R" for _ in self.value) if NO_GRAD in self.grad else self.grad

    def __str__(self) -> str:
        return f"{show(self.value)}|{show(self.grad)}"


def pair(uses: tuple[Use, ...]) -> Pair:
    """The layouts of value and gradient, from one use per axis."""
    return Pair(tuple(u.value for u in uses), tuple(u.grad for u in uses))


@cache
def synced(row: Pair, column: Pair) -> Layout:
    """The gradient of a weight's leaf, before it is summed or scattered: partial where the weight is gathered once per step, and
    where it rests whole and the reader leaves a part (codegen.edges says the same of a plan)."""
    if NO_GRAD in column.grad or NO_GRAD in row.grad:
        return row.grad
    once = gathered_axes(row.value, row.grad)
    return tuple("P" if axis in once or (rest == value == "R" and grad == "P") else own
                 for axis, (rest, value, grad, own) in enumerate(zip(row.value, column.value, column.grad, row.grad, strict=True)))
