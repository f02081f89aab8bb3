"""Who keeps what alive. Hooks of tensors are held by torch's own objects, which no garbage collector sees through: a leaf whose hook holds what holds the leaf is never let go of, nor is the
memory of the model. So hooks know their objects weakly, and what a backward needs of a module that is gone its graph keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod

from torch import Tensor


def weakly(method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """A bound `method` with `args` in front of what it is called with, which does not keep its object alive; nothing once that is gone."""
    found = WeakMethod(method)

    def call(*more: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*args, *more)

    return call


def kept_by(values: Iterable[Tensor], what: object) -> None:
    """Keep `what` alive as long as a backward may come through one of `values`."""
    for value in values:
        if value.grad_fn is not None:
            notes: Any = value.grad_fn.metadata  # a dict, which torch types as a method
            notes[__name__] = what
