"""Runs of a model without values: tensors have shapes, and where a shape depends on values (which rows a mask picks) it is made up.

What is compared of such runs is which operators they are, of what; how many rows there would be makes no difference to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar._torch import Watch, fake_mode

UNTOLD = (RuntimeError, NotImplementedError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)
"""What a model raises that cannot run without values, not in the other mode, or not with fewer blocks."""
PICKED = 5
"""Rows that any mask picks."""


@contextmanager
def valueless() -> Iterator[None]:
    """Tensors made inside have no values; masks pick `PICKED` rows."""
    with fake_mode(), Watch(instead=_picked):
        yield


def _picked(operator: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    if operator is not torch.ops.aten.nonzero.default:
        return None
    mask = args[0]
    found: torch.Tensor = mask.new_empty((PICKED, mask.dim()), dtype=torch.int64)
    return found
