"""Facts about masks and tensors derived from them that hold whatever their values: which mask a tensor of indices comes
from, and what is zero where a mask selects nothing.

    mask = chosen == 3                          # Mask
    token, rank = torch.where(mask)             # Rows
    mask.sum()                                  # Size
    mask.sum() > 0                              # Verdict
    torch.bincount(chosen, minlength=8)         # Counts
    masks = one_hot(chosen, 8)                  # Masks
    hit = masks.sum((0, 1)) > 0                 # Hits
    for number in hit.nonzero(): ...            # Numbers
    chosen = gates.topk(2).indices              # Below
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.capture._torch import dtype_of
from autopar.capture.by_tensor import UntilChanged
from autopar.capture.leaves import tensors_of

Key = Hashable
"""Identifies masks: two masks with equal keys select something in the same cases."""

SAME = ("clone", "contiguous", "cpu", "detach", "int", "long")
RESHAPED = (*SAME, "flatten", "permute", "ravel", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view")
"""Functions whose result has the same elements, in another shape or order."""
WIDENED = ("double", "float")
"""Casts that keep integers exact."""
CAST = ("bool", "float", "to", "type")
PARTS = ("getitem", "select", "split", "unbind")
REDUCED = ("any", "count_nonzero", "sum")
"""Reductions whose result of a mask is true, or above zero, where it selects something."""
RANKED = {"argmax": (0, 0, None), "max": (1, 0, None), "sort": (1, 0, -1), "topk": (1, 1, -1)}
"""Functions that return positions along a dim -> (which of their results has the positions, the position of `dim` among
the arguments after the first, the default of `dim`)."""
COMPARED = {
    "eq": operator.eq,
    "ge": operator.ge,
    "greater": operator.gt,
    "gt": operator.gt,
    "le": operator.le,
    "less": operator.lt,
    "lt": operator.lt,
    "ne": operator.ne,
}
ZEROS = ("new_zeros", "zeros", "zeros_like")
LARGEST_COUNT = 2**62
"""A comparison that gives the same for 1 and for this gives it for every count of selected rows but 0."""


def is_number(numbers: Key, number: int) -> Key:
    """The key of `numbers == number`."""
    return "is", numbers, number


@dataclass(frozen=True)
class Mask:
    """A tensor that is true or positive at selected elements, and false or zero elsewhere."""

    key: Key


@dataclass(frozen=True)
class Rows:
    """Indices of the elements that a mask selects, or another tensor with one row for each of them."""

    key: Key


@dataclass(frozen=True)
class Size:
    """A number that is zero where a mask selects nothing and positive where it selects something. With `counts`, it is
    one of these counts."""

    key: Key
    counts: Counts | None = None


@dataclass(frozen=True)
class Verdict:
    """A condition that has the value `nothing` where a mask selects nothing, and `something` where it selects
    something."""

    key: Key
    nothing: bool
    something: bool


@dataclass(frozen=True)
class Masks:
    """The masks `numbers == n` for n in range(count), stacked along `dim`; `numbers` has `total` elements."""

    numbers: Key
    count: int
    dim: int
    total: Any


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros."""


@dataclass(frozen=True)
class Counts:
    """How often each n in range(count) occurs in `numbers`, which has `total` elements."""

    numbers: Key
    count: int
    total: Any


@dataclass(frozen=True)
class Hits:
    """Whether each n in range(count) occurs in `numbers`."""

    numbers: Key
    count: int


@dataclass(frozen=True)
class Numbers:
    """A tensor whose elements are known."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Below:
    """A tensor with elements in range(count)."""

    count: int


Mark = Mask | Rows | Size | Verdict | Masks | Zeros | Counts | Hits | Numbers | Below


class Marks:
    """What is known of the tensors of one run, by tensor; `number` gives equal keys for equal tensors."""

    def __init__(self) -> None:
        self.number: Callable[[Tensor], Key] = id
        self._marks = UntilChanged[Mark]()
        self._numbers = UntilChanged[Key]()  # the key of the tensor whose elements one has, in another shape

    def of(self, tensor: Tensor) -> Mark | None:
        """What is known of a tensor; any boolean tensor is a mask."""
        found = self._marks.get(tensor)
        return Mask(self.number(tensor)) if found is None and dtype_of(tensor) is torch.bool else found

    def mask(self, tensor: Tensor) -> Key:
        """The key of a tensor that is used as a mask."""
        found = self.of(tensor)
        return found.key if isinstance(found, Mask) else self.number(tensor)

    def base(self, tensor: Tensor) -> Key:
        """A key that tensors with the same elements share, whatever their shapes."""
        found = self._numbers.get(tensor)
        return self.number(tensor) if found is None else found

    def keep(self, tensors: Sequence[Tensor], mark: Mark) -> None:
        """Mark `tensors`."""
        for tensor in tensors:
            self._marks.keep(tensor, mark)

    def forget(self, tensor: Tensor) -> None:
        """Drop what is known of a tensor that is changed in place, and of all views of its memory."""
        self._marks.forget(tensor)
        self._numbers.forget(tensor)

    def made(self, name: str, result: Any) -> Any:
        """Note and return the `result` of a function `name` without tensor arguments."""
        if name in ZEROS:
            self.keep(tensors_of(result), Zeros())
        return result

    def note(
        self, name: str, own: Tensor, known: Mark | None, more: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note what follows for `result`, of the function `name` applied to `own`, of which `known` is known, and to
        the further arguments `more` and `kwargs`."""
        if name in (*RESHAPED, *WIDENED):
            self._numbers.keep(result, self.base(own))
        for number, part in enumerate(tensors_of(result)):
            if name in PARTS:
                mark = _part(known, part, _place(name, number, own, more, kwargs), self.number)
            elif name in RANKED:
                mark = _below(name, number, own, more, kwargs)
            elif name in COMPARED and len(more) == 1 and isinstance(more[0], int | float):
                mark = self._compared(name, own, known, more[0])
            else:
                mark = self._whole(name, own, known, more, kwargs, part)
            if mark is not None:
                self.keep([part], mark)

    def _compared(self, name: str, own: Tensor, known: Mark | None, other: float) -> Mark | None:
        """What is known of the result of a comparison of `own` with the number `other`."""
        says = COMPARED[name]
        always = says(1, other) == says(LARGEST_COUNT, other)
        if isinstance(known, Size):
            return Verdict(known.key, says(0, other), says(1, other)) if always else None
        if isinstance(known, Counts):
            return Hits(known.numbers, known.count) if always and says(1, other) and not says(0, other) else None
        if isinstance(known, Numbers) and len(known.values) == 1:
            return Verdict(None, *[says(known.values[0], other)] * 2)
        return Mask(is_number(self.base(own), other)) if name == "eq" and not own.is_floating_point() else None  # type: ignore[arg-type]

    def _whole(
        self, name: str, own: Tensor, known: Mark | None, more: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> Mark | None:
        """What is known of `result` where it is neither a part of `own` nor a comparison; arguments as of `note`."""
        if name == "bincount":
            given = {
                "weights": None,
                "minlength": 0,
                **dict(zip(("weights", "minlength"), more, strict=False)),
                **kwargs,
            }
            least = given["minlength"]
            return (
                Counts(self.base(own), least, own.numel())
                if given["weights"] is None and isinstance(least, int) and least
                else None
            )
        if name == "histc" and (bins := _whole_bins(more, kwargs)):
            return Counts(self.base(own), bins, own.numel())
        if name in ZEROS:
            return Zeros()
        if name == "one_hot":
            return Masks(self.base(own), result.shape[-1], result.dim() - 1, own.numel())
        if (
            name == "scatter"
            and isinstance(known, Zeros)
            and len(more) == 3
            and isinstance(more[2], int | float)
            and more[2] == 1
        ):
            return (
                Masks(self.base(more[1]), own.shape[more[0]], more[0] % own.dim(), more[1].numel())
                if isinstance(own.shape[more[0]], int)
                else None
            )
        if isinstance(known, Masks):
            return _of_masks(known, name, own, more, kwargs, result)
        if name in REDUCED:
            return None if not isinstance(known, Mask) else Mask(known.key) if result.dim() else Size(known.key)
        return known if name in RESHAPED or (name in CAST and isinstance(known, Mask)) else None


def _part(known: Mark | None, part: Tensor, place: Any, name: Callable[[Tensor], Key]) -> Mark | None:
    """What is known of the part at `place` (`_place`) of a tensor of which `known` is known."""
    if isinstance(known, Counts | Masks | Hits):
        if not isinstance(place, int) or getattr(known, "dim", 0) != 0:
            return None
        key = is_number(known.numbers, place % known.count)
        return Mask(key) if isinstance(known, Masks) else Size(key, known if isinstance(known, Counts) else None)
    if isinstance(known, Numbers):
        first = place[0] if isinstance(place, tuple) and place else place
        if isinstance(first, slice):
            return Numbers(known.values[first])
        return Numbers(known.values[first:][:1]) if isinstance(first, int) else None
    return Mask(name(part)) if isinstance(known, Mask) else known if isinstance(known, Rows) else None


def _place(name: str, number: int, own: Tensor, more: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The index into the first dim of `own`, or into more of its dims, at which result number `number` of a function of
    PARTS is; None where that is along another dim, or has several numbers."""
    if name == "getitem":
        return more[0]
    names = {"select": ("dim", "index"), "split": ("size", "dim"), "unbind": ("dim",)}[name]
    given = {"dim": 0, **dict(zip(names, more, strict=False)), **kwargs}
    if given["dim"] not in (0, -own.dim()) or (name == "split" and given.get("size") != 1):
        return None
    return given["index"] if name == "select" else number


def _whole_bins(more: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The number of bins of a `histc` with one bin for each integer from 0; 0 for any other histogram."""
    given = dict(zip(("bins", "min", "max"), more, strict=False)) | kwargs
    bins = given.get("bins", 100)
    return bins if isinstance(bins, int) and given.get("min", 0) == 0 and given.get("max", 0) == bins - 1 else 0


def _below(name: str, number: int, own: Tensor, more: Sequence[Any], kwargs: dict[str, Any]) -> Below | None:
    """What is known of positions along the last dim, where its size is an int."""
    place, position, default = RANKED[name]
    dim = kwargs.get("dim", more[position] if len(more) > position else default)
    count = own.shape[-1] if own.dim() else 0
    return (
        Below(count)
        if number == place and dim in (-1, own.dim() - 1) and isinstance(dim, int) and isinstance(count, int)
        else None
    )


def _of_masks(
    known: Masks, name: str, own: Tensor, more: Sequence[Any], kwargs: dict[str, Any], result: Tensor
) -> Mark | None:
    """What is known of stacked masks whose dims are permuted, or reduced except for the stacking dim."""
    if name == "permute":
        order = [dim % own.dim() for dim in (more[0] if isinstance(more[0], tuple | list) else more)]
        return replace(known, dim=order.index(known.dim))
    if name in (*CAST, *SAME):
        return known
    if name not in REDUCED:
        return None
    dims = kwargs.get("dim", more[0] if more else None)
    summed = {dim % own.dim() for dim in ((dims,) if isinstance(dims, int) else dims or ())}
    if known.dim in summed or result.dim() != own.dim() - len(summed):
        return None
    left = replace(known, dim=known.dim - sum(dim < known.dim for dim in summed))
    return (
        left
        if result.dim() > 1
        else Hits(known.numbers, known.count)
        if name == "any"
        else Counts(known.numbers, known.count, known.total)
    )
