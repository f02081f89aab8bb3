"""What is known of masks, and of what is made of them, whatever their values: which rows a tensor names, and what is zero where a mask picks nothing.

    mask = chosen == 3                 # Mask
    token, rank = torch.where(mask)    # Rows
    mask.sum()                         # Size
    mask.sum() > 0                     # Verdict
    torch.bincount(chosen)             # Counts
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree

Key = Hashable
"""Of masks that pick something or nothing together."""

SHAPED = ("clone", "contiguous", "detach", "flatten", "int", "long", "permute", "ravel", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view")
"""They give the same numbers, in another shape or order."""
CAST = ("bool", "float", "to", "type")
PARTS = ("getitem", "select", "split", "unbind")
REDUCED = ("any", "count_nonzero", "sum")
"""What they give of a mask is true, or above zero, where it picks something."""
COMPARED = {"eq": operator.eq, "ge": operator.ge, "greater": operator.gt, "gt": operator.gt, "le": operator.le, "less": operator.lt, "lt": operator.lt, "ne": operator.ne}
MANY = 2**62


@dataclass(frozen=True)
class Mask:
    """True or positive where something is picked, false or zero elsewhere."""

    key: Key


@dataclass(frozen=True)
class Rows:
    """Indices of what a mask picks, or as many other things."""

    key: Key


@dataclass(frozen=True)
class Size:
    """A number, zero where a mask picks nothing and positive where it picks something."""

    key: Key


@dataclass(frozen=True)
class Verdict:
    """A condition, and what it is where a mask picks nothing, and where it picks something."""

    key: Key
    nothing: bool
    something: bool


@dataclass(frozen=True)
class Counts:
    """How often `numbers` has 0, 1, ... `count` - 1."""

    numbers: Key
    count: int

    def size(self, number: int) -> Size:
        """One of them."""
        return Size(("is", self.numbers, number))


Mark = Mask | Rows | Size | Verdict | Counts


class Marks:
    """The marks of the tensors of one run; `number` says what is equal for equal tensors."""

    def __init__(self) -> None:
        self.number: Callable[[Tensor], Key] = id
        self._marks: dict[int, Mark] = {}
        self._numbers: dict[int, Key] = {}  # of what has the numbers of another tensor in another shape
        self._alive: list[Tensor] = []  # the id of a freed tensor would be used again

    def of(self, tensor: Tensor) -> Mark | None:
        """What is known of a tensor; of any one of booleans that it is a mask."""
        found = self._marks.get(id(tensor))
        return Mask(self.number(tensor)) if found is None and tensor.dtype is torch.bool else found

    def mask(self, tensor: Tensor) -> Key:
        """The key of a tensor that is used as a mask."""
        found = self.of(tensor)
        return found.key if isinstance(found, Mask) else self.number(tensor)

    def rows(self, tensors: Sequence[Tensor], key: Key) -> None:
        """`tensors` are what a mask picks."""
        for tensor in tensors:
            self._keep(tensor, Rows(key))

    def forget(self, tensor: Tensor) -> None:
        """What was known of what is changed in place."""
        self._marks.pop(id(tensor), None)
        self._numbers.pop(id(tensor), None)

    def note(self, name: str, own: Tensor, more: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """What follows for the `result` of a function `name` of `own` and `more`."""
        if name in SHAPED:
            self._alive.append(result)
            self._numbers[id(result)] = self._base(own)
        known = self.of(own)
        for number, part in enumerate(tensors_of(result)):
            if name in PARTS:
                mark = self._part(known, part, more[0] if name == "getitem" else number)
            elif name in COMPARED and len(more) == 1 and isinstance(more[0], int | float):
                mark = self._compared(name, own, known, more[0])
            else:
                mark = self._whole(name, own, known, more, kwargs, part)
            if mark is not None:
                self._keep(part, mark)

    def _part(self, known: Mark | None, part: Tensor, number: Any) -> Mark | None:
        if isinstance(known, Counts):
            return known.size(number) if isinstance(number, int) else None
        return Mask(self.number(part)) if isinstance(known, Mask) else known if isinstance(known, Rows) else None

    def _compared(self, name: str, own: Tensor, known: Mark | None, other: float) -> Mark | None:
        says = COMPARED[name]
        if isinstance(known, Size):
            always = says(1, other) == says(MANY, other)
            return Verdict(known.key, says(0, other), says(1, other)) if always else None
        return Mask(("is", self._base(own), other)) if name == "eq" and not own.is_floating_point() else None

    def _whole(self, name: str, own: Tensor, known: Mark | None, more: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> Mark | None:
        if name == "bincount":
            least = kwargs.get("minlength", more[-1] if more else 0)
            return Counts(self._base(own), least) if isinstance(least, int) and least and kwargs.keys() <= {"minlength"} else None
        if name == "one_hot":
            return Mask(self.number(result))
        if name in REDUCED:
            return None if not isinstance(known, Mask) else Mask(known.key) if result.dim() else Size(known.key)
        return known if name in SHAPED or (name in CAST and isinstance(known, Mask)) else None

    def _base(self, tensor: Tensor) -> Key:
        return self._numbers.get(id(tensor), self.number(tensor))

    def _keep(self, tensor: Tensor, mark: Mark) -> None:
        self._alive.append(tensor)
        self._marks[id(tensor)] = mark


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
