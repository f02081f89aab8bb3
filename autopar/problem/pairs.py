"""The layouts of a value and of its gradient as one pair: what a producer makes, or what a reader asks for."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from autopar.layout import NO_GRAD, Layout, parse, show
from autopar.problem.at_rest import gathered_axes
from autopar.rules.language import Use


class LayoutPair(NamedTuple):
    """Layouts of a value and of its gradient (all "-" where it has none). `each`, of a weight: its gradient is
    scattered after every microbatch, not once per step."""

    value: Layout
    grad: Layout
    each: bool = False

    @staticmethod
    @cache
    def of(text: str) -> LayoutPair:
        """From a plan's `"S0,R|S0,P"`."""
        value, grad = text.split("|")
        return LayoutPair(parse(value), tuple(grad.split(",")) if grad else ())

    @staticmethod
    def of_uses(uses: tuple[Use, ...]) -> LayoutPair:
        """From one use per mesh axis."""
        return LayoutPair(tuple(u.value for u in uses), tuple(u.grad for u in uses))

    @property
    def has_grad(self) -> bool:
        """Whether the value has a gradient."""
        return NO_GRAD not in self.grad

    @property
    def back(self) -> Layout:
        """The gradient's layout; replicated where there is no gradient, so that its reshards cost nothing."""
        return self.grad if self.has_grad else tuple("R" for _ in self.value)

    @property
    def rest(self) -> Layout:
        """The layout in which a parameter with these layouts rests."""
        return self.grad if self.has_grad else self.value

    @property
    def gathered(self) -> tuple[int, ...]:
        """The axes on which a weight with these layouts is gathered once per step."""
        return gathered_axes(self.value, self.grad) if self.has_grad else ()

    def partial(self, axes: tuple[int, ...]) -> LayoutPair:
        """With a partial gradient on `axes`."""
        return LayoutPair(self.value, tuple("P" if a in axes else g for a, g in enumerate(self.grad)))

    def __str__(self) -> str:
        return f"{show(self.value)}|{show(self.grad)}"


@cache
def synced(row: LayoutPair, column: LayoutPair) -> Layout:
    """The gradient of a weight's leaf, before it is summed or scattered: partial where the weight is gathered once per
    step, and where it rests whole and the reader leaves a part (codegen.edges says the same of a plan)."""
    if NO_GRAD in column.grad or NO_GRAD in row.grad:
        return row.grad
    once = gathered_axes(row.value, row.grad)
    return tuple(
        "P" if axis in once or (rest == value == "R" and grad == "P") else own
        for axis, (rest, value, grad, own) in enumerate(
            zip(row.value, column.value, column.grad, row.grad, strict=True)
        )
    )
