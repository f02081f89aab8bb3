"""Runs of a model without values: tensors have only shapes, and data-dependent shapes (rows selected by a mask) are a
fixed number. Used by tape, outer_code and failures.

Such runs are compared by their operators and operands, which do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar._torch import Watch, fake_mode
from autopar.capture._torch import quietly
from autopar.capture.value_checks import passing_guards

PICKED = 5
"""The number of rows that every mask selects."""


@contextmanager
def valueless() -> Iterator[None]:
    """A context in which new tensors have no values, and every mask selects `PICKED` rows."""
    with quietly(), fake_mode(), passing_guards(), Watch(instead=_made_up):
        yield


def _made_up(operator: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    make = MADE_UP.get(operator)
    return None if make is None else make(*args)


def _places(mask: torch.Tensor) -> torch.Tensor:
    """In place of nonzero."""
    return mask.new_empty((PICKED, mask.dim()), dtype=torch.int64)


def _counts(numbers: torch.Tensor, weights: torch.Tensor | None = None, least: int = 0) -> torch.Tensor:
    """In place of bincount: as many counts as `minlength` asks for."""
    return numbers.new_empty((max(least, 1),), dtype=torch.int64 if weights is None else torch.float64)


def _rows(values: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The result of indexing with a mask; None where no index is a mask."""
    if not any(_is_mask(index) for index in indices):
        return None
    places = [part for index in indices for part in (_places(index).unbind(1) if _is_mask(index) else [index])]  # type: ignore[arg-type]
    return torch.ops.aten.index.Tensor(values, places)


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype is torch.bool


MADE_UP: dict[Any, Any] = {
    torch.ops.aten.nonzero.default: _places,
    torch.ops.aten.bincount.default: _counts,
    torch.ops.aten.index.Tensor: _rows,
}
"""Operators whose sizes of results depend on values -> a replacement with fixed sizes."""
