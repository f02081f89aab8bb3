"""Masks that a model computes twice, `F.mse_loss(h[y > 0], x[y > 0])`: what they pick has one size. Used by export.

torch gives what each mask picks a size of its own, which need not equal that of another. Here rows are picked by the
first of several masks that are the same comparisons of the same tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.capture.by_tensor import UntilChanged
from autopar.capture.devices import changed
from autopar.capture.mask_branches import PICKS
from autopar.capture.mask_facts import COMPARED

MADE = (
    *COMPARED,
    *(f"{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "not", "or", "xor")),
    *("and", "invert", "isfinite", "isinf", "isnan", "or", "xor"),
)
"""Functions that make masks, which are equal where their arguments are."""
PICKED_BY = {"getitem": 1, "masked_select": 1, "setitem": 1, **dict.fromkeys(PICKS, 0)}
"""Functions that pick rows -> the position of their mask. None gives a view of the mask."""


class EqualMasks(TorchFunctionMode):
    """A mode in which rows are picked by the first of equal masks."""

    def __init__(self) -> None:
        super().__init__()
        self._new = count()
        self._numbers = UntilChanged[int]()  # the same for equal tensors
        self._known: dict[Hashable, int] = {}  # how a mask is made -> its number
        self._first: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").strip("_")
        place = PICKED_BY.get(name)
        if place is not None and len(args) > place and isinstance(args[place], Tensor):
            args = (*args[:place], self._first_equal(args[place]), *args[place + 1 :])
        result = func(*args, **kwargs)
        for tensor in changed(func, args, kwargs):
            self._numbers.forget(tensor)
        plain = all(isinstance(item, Tensor | bool | int | float) for item in args)
        if name in MADE and plain and not kwargs and isinstance(result, Tensor):
            how = (name, *((type(item), self._number(item) if isinstance(item, Tensor) else item) for item in args))
            self._numbers.keep(result, self._known.setdefault(how, next(self._new)))
        return result

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor; a new one where it has none, or was changed since."""
        number = self._numbers.get(tensor)
        if number is None:
            number = next(self._new)
            self._numbers.keep(tensor, number)
        return number

    def _first_equal(self, mask: Tensor) -> Tensor:
        """The first mask that is equal to this one and was not changed."""
        number = self._number(mask)
        first = self._first.setdefault(number, mask)
        if self._numbers.get(first) != number:
            first = self._first[number] = mask
        return first
