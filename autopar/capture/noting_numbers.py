"""Numbers that note what they are compared with: of a count of steps, at which later step a comparison turns out
otherwise.

    self.steps += 1
    if self.steps == 100: ...      # steps is 3 now; 97 steps later this is true

A number knows what it is any number of steps later, and so does what is computed of it. What Python makes a plain
number of (an index, the key of a dict, `math.cos`) notes nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NEAR = 4096
"""The number of steps that are looked at one by one."""
Later = Callable[[int], float]
"""A number, by how many steps later it is read."""


@dataclass(frozen=True)
class Comparison:
    """What a number was compared with: `how(left, right)`, now and later."""

    how: Callable[[Any, Any], bool]
    left: Later
    right: Later

    def turns(self) -> int | None:
        """After how many steps it first turns out otherwise than now; None where that is not found: it is looked for in
        the next steps, and where two numbers that change evenly meet."""
        now = self._holds(0)
        return next((steps for steps in self._tried() if self._holds(steps) not in (now, None)), None)

    def _tried(self) -> Iterator[int]:
        yield from range(1, NEAR)
        try:
            gap, slope = self.left(0) - self.right(0), self.left(1) - self.right(1) - self.left(0) + self.right(0)
            meeting = math.floor(-gap / slope)
        except (ArithmeticError, ValueError):
            return
        yield from (steps for steps in range(meeting - 1, meeting + 3) if steps >= NEAR)

    def _holds(self, steps: int) -> bool | None:
        try:
            return bool(self.how(self.left(steps), self.right(steps)))
        except (ArithmeticError, ValueError):
            return None


class _Noting:
    """What noting ints and floats share. `later`: what the number is then; `noted`: where comparisons are noted."""

    later: Later
    noted: list[Comparison]

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _Int(_Noting, int):
    pass


class _Float(_Noting, float):
    pass


def noting(value: float, later: Later, noted: list[Comparison]) -> Any:
    """The int or float `value`, which is `later(steps)` that many steps later, and adds to `noted` what it is compared
    with. Anything else is itself."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    made = _Int(value) if isinstance(value, int) else _Float(value)
    made.later, made.noted = later, noted
    return made


def plain(value: Any) -> Any:
    """A noting number as a common one; anything else is itself."""
    return int(value) if isinstance(value, _Int) else float(value) if isinstance(value, _Float) else value


def _later_of(value: Any) -> Later:
    return value.later if isinstance(value, _Noting) else lambda steps: value


def _computes(how: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """The method of a noting number that computes with it and with another number."""

    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented
        read = (self, *others)[:: -1 if swapped else 1]
        then = [_later_of(one) for one in read]
        return noting(how(*map(plain, read)), lambda steps: how(*(one(steps) for one in then)), self.noted)

    return method


def _compares(how: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """The method of a noting number that compares it with another number."""

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        self.noted.append(Comparison(how, self.later, _later_of(other)))
        return how(plain(self), plain(other))

    return method


def _truth(self: Any) -> bool:
    return bool(self != 0)


for _kind in (_Int, _Float):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _computes(getattr(operator, _name)))
        setattr(_kind, f"__r{_name}__", _computes(getattr(operator, _name), swapped=True))
    for _how in (operator.neg, operator.abs, round, math.floor, math.ceil, math.trunc):
        setattr(_kind, f"__{_how.__name__}__", _computes(_how))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _compares(getattr(operator, _name)))
    _kind.__bool__ = _truth  # type: ignore[method-assign]
    _kind.__hash__ = (int if _kind is _Int else float).__hash__  # type: ignore[method-assign]
