"""Control flow on whether a mask selects anything, answered while a model runs without values. Used by export.

    token, rank = torch.where(chosen == 3)
    if token.numel() == 0: continue               # or (chosen == 3).any(), its sum, bincount(chosen)[3]

Loops over experts skip the experts that no token chose. A graph has one branch: the one of masks that select something,
which is right if the other branch equals it with no rows (`capture.empty_branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture.devices import changed
from autopar.capture.leaves import tensors_of
from autopar.capture.mask_facts import (
    Below,
    Counts,
    Hits,
    Key,
    Mark,
    Marks,
    Mask,
    Numbers,
    Rows,
    Size,
    Verdict,
    is_number,
)
from autopar.capture.valueless import PICKED

PICKS = ("argwhere", "nonzero", "where")
"""Functions that return the indices of a mask's true elements."""
SPLITS = ("split", "split_with_sizes")
WRITES = {"setitem": 1, "index_add": 2, "index_copy": 2, "index_put": 1, "scatter_add": 2}
"""Functions that write into rows -> the position of the argument with the indices of the rows."""
ASKED = ("bool", "index", "int", "item")
"""Functions that make a Python value of a tensor."""
TAKEN = ("eq", "getitem", "ne")
"""Functions whose arguments after the first may be a tensor with a known number, which is then passed as a number."""


@dataclass(frozen=True)
class Column:
    """A one-element tensor whose value is known."""

    number: int


class Picking(TorchFunctionMode):
    """Answers conditions on masks as if each mask selected something, except the masks numbered in `empty`; masks are
    numbered from 0 in the order of their first use. Writes to rows selected by masks in `dropped` are left out. With
    `check`, sizes stay symbolic: `check` is called with conditions that hold where a mask selects at least `least`
    rows, and nothing is answered where that is 0. `seen`: key of a mask, equal for equal masks -> its number."""

    def __init__(
        self,
        empty: Container[int] = (),
        dropped: Container[int] = (),
        *,
        check: Callable[[Any], None] | None = None,
        least: int = 1,
    ) -> None:
        super().__init__()
        self.marks, self.seen = Marks(), dict[Key, int]()
        self._without, self._dropped, self._check, self._least = empty, dropped, check, least

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Drop what is known of tensors that are changed in place."""
        for tensor in tensors:
            self.marks.forget(tensor)

    def _number(self, key: Key) -> int:
        """The number of a mask; a new one where it is used for the first time."""
        return self.seen.setdefault(key, len(self.seen))

    def _empty(self, key: Key) -> bool:
        """Whether a mask is assumed to select nothing."""
        return self._number(key) in self._without

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func)).strip("_")
        if not args or not isinstance(args[0], Tensor):
            result = func(*args, **kwargs)
            self._forget(changed(func, args, kwargs))
            return self.marks.made(name, result)
        if name in TAKEN:
            args = (args[0], *pytree.tree_map(self._plain, args[1:]))
        if (found := self._instead(func, name, args, kwargs)) is not None:
            return found
        own, known = args[0], self.marks.of(args[0])
        result = func(*args, **kwargs)
        in_place = changed(func, args, kwargs)
        self._forget(in_place)
        if not in_place or name == "scatter":
            self.marks.note(name, own, known, args[1:], kwargs, result)
        if self._check is not None and name == "bincount" and isinstance(counts := self.marks.of(result), Counts):
            self._check(result.shape[0] == counts.count)
        return result

    def _instead(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function that is answered or replaced here; None where it runs as it is."""
        own = args[0]
        if name in ASKED:
            return self._answer(name, own, self.marks.of(own))
        if name in WRITES:
            return own if self._is_dropped((*args, *kwargs.values())[WRITES[name]]) else None
        if name in SPLITS:
            self._fill(own, *args[1:], **kwargs)
            return None
        if name == "unique":
            plain = not any((*args[2:], *(value for key, value in kwargs.items() if key != "sorted")))
            known = self.marks.of(own)
            return (
                self._hit(Hits(self.marks.base(own), known.count), own, flat=True)
                if plain and self._least and isinstance(known, Below)
                else None
            )
        if name == "getitem" and isinstance(args[1], Column):
            with self:
                return own[args[1].number].unsqueeze(0)
        mask = _picking(name, args, kwargs)
        if mask is None:
            return None
        known, flat = self.marks.of(mask), bool(kwargs.get("as_tuple")) or name == "where"
        if isinstance(known, Hits) and self._least:
            numbers = self._hit(known, mask, flat=flat)
            return (numbers,) if flat else numbers
        return self._picked(self.marks.mask(mask), func(*args, **kwargs))

    def _answer(self, name: str, own: Tensor, known: Mark | None) -> Any:
        """The Python value of a tensor (bool, int, item, index); None where it is not known."""
        if isinstance(known, Numbers) and len(known.values) == 1:
            return known.values[0]
        whether = name == "bool" or own.dtype is torch.bool
        if isinstance(known, Size) and not whether:
            return self._size(own, known)
        if self._least == 0:
            return None
        if isinstance(known, Size):
            return not self._empty(known.key)
        if isinstance(known, Verdict):
            return (
                known.something if known.key is None else known.nothing if self._empty(known.key) else known.something
            )
        return None

    def _size(self, own: Tensor, known: Size) -> Any:
        """The number of rows that `own` says a mask selects: an assumed one, or with `check` a symbolic size."""
        if self._check is None:
            return (
                0
                if self._empty(known.key)
                else PICKED
                if known.counts is None
                else self._share(known.counts, known.key)
            )
        size = own.item()
        self._check(size >= self._least)
        return size

    def _share(self, counts: Counts, key: Key) -> int:
        """The assumed count of number `key` in `counts`: the total is divided evenly among the numbers that occur, and
        the last one gets the remainder; at least 1."""
        there = [each for number in range(counts.count) if not self._empty(each := is_number(counts.numbers, number))]
        share = counts.total // len(there)
        return max(1, int(counts.total - share * (len(there) - 1) if key == there[-1] else share))

    def _fill(self, own: Tensor, sizes: Any = (), dim: int = 0) -> None:
        """State to `check` that the sizes of a split are not negative and add up to the size of the dim."""
        if (
            self._check is None
            or not isinstance(sizes, list | tuple)
            or not any(isinstance(size, torch.SymInt) for size in sizes)
        ):
            return
        for size in sizes:
            self._check(size >= 0)
        self._check(sum(sizes) == own.shape[dim])

    def _picked(self, key: Key, result: Any) -> Any:
        """`result`, the rows or indices that mask `key` selects; without rows where the mask is empty."""
        if self._empty(key):
            result = pytree.tree_map(lambda rows: rows[:0], result)
        picked = tensors_of(result)
        self.marks.keep(picked, Rows(key))
        if self._check is not None and self._least:
            self._check(picked[0].shape[0] >= self._least)
        return result

    def _hit(self, known: Hits, like: Tensor, *, flat: bool) -> Tensor:
        """The numbers that occur (`torch.nonzero` or `unique`), as a vector where `flat`, else as a column."""
        keys = {number: is_number(known.numbers, number) for number in range(known.count)}
        values = tuple(number for number, key in keys.items() if not self._empty(key))
        result = like.new_empty((len(values),) if flat else (len(values), 1), dtype=torch.int64)
        self.marks.keep([result], Numbers(values))
        return result

    def _plain(self, item: Any) -> Any:
        """The number that a tensor is known to have, or a Column for a tensor with a dim; other arguments unchanged."""
        known = self.marks.of(item) if isinstance(item, Tensor) else None
        if not isinstance(known, Numbers) or len(known.values) != 1:
            return item
        return known.values[0] if item.dim() == 0 else Column(known.values[0])

    def _is_dropped(self, index: Any) -> bool:
        """Whether writes to the rows at `index` are left out."""
        marks = [self.marks.of(part) for part in tensors_of(index)]
        return any(self._number(mark.key) in self._dropped for mark in marks if isinstance(mark, Rows | Mask))


def _picking(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The mask of a call that returns the indices of its true elements, or indexes with it; None for other calls."""
    if name in PICKS:
        return args[0] if len(args) == 1 and kwargs.keys() <= {"as_tuple"} else None
    if name != "getitem":
        return None
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    return first if isinstance(first, Tensor) and first.dtype is torch.bool else None
