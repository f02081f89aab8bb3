"""Functions that a model holds (hooks, `self.act = lambda x: self.scale(x)`) and that have the model in their closures.
`copy.deepcopy` leaves functions as they are: those of a copy would read and change the original. Used by shadow and
outside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any
from unittest import mock

from torch import nn

Memo = dict[int, Any]
"""What `copy.deepcopy` has copied: id -> copy."""
UNSET = object()
"""What a name has that has no value."""


@contextmanager
def closures_copied(model: nn.Module) -> Iterator[None]:
    """A context in which a deep copy of `model` has functions whose closures hold the copy. Of what else closures hold,
    lists, dicts and numbers are the copy's own; other objects, and modules of no part of the model, are shared."""
    ours = {id(module) for module in model.modules()}

    def function(original: FunctionType, memo: Memo) -> FunctionType:
        if original.__closure__ is None:
            return original
        cells = [memo.setdefault(id(cell), CellType()) for cell in original.__closure__]
        made = FunctionType(
            original.__code__, original.__globals__, original.__name__, original.__defaults__, tuple(cells)
        )
        made.__kwdefaults__ = original.__kwdefaults__
        vars(made).update(vars(original))
        memo[id(original)] = made
        for cell, new in zip(original.__closure__, cells, strict=True):
            if (inside := content(cell)) is not UNSET and content(new) is UNSET:
                new.cell_contents = held(inside, memo)
        return made

    def held(value: Any, memo: Memo) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        if id(value) in ours or isinstance(value, FunctionType):
            return copy.deepcopy(value, memo)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, held(value.__self__, memo))
        if type(value) is list:
            items: list[Any] = []
            memo[id(value)] = items
            items.extend(held(item, memo) for item in value)
            return items
        if type(value) is dict:
            named: dict[Any, Any] = {}
            memo[id(value)] = named
            named.update({key: held(item, memo) for key, item in value.items()})
            return named
        return value

    with mock.patch.dict(copy._deepcopy_dispatch, {FunctionType: function}):  # type: ignore[attr-defined]
        yield


def content(cell: CellType) -> Any:
    """What a cell holds, or UNSET."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET
