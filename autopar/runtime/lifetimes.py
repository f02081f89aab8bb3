"""Lifetimes: hooks that do not leak the model. Hooks of tensors are held by torch's C++ objects, which Python's garbage
collector does not traverse, so a hook that refers to an object which holds its tensor is a cycle that is never freed.
Hooks therefore refer to their objects weakly (`weakly`), and the autograd graph keeps alive what its backward needs
(`kept_by`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod

from torch import Tensor


def weakly(method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """A function that calls the bound `method` with `args` and its own arguments. It does not keep the method's object
    alive, and does nothing once that is gone."""
    found = WeakMethod(method)

    def call(*more: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*args, *more)

    return call


def kept_by(values: Iterable[Tensor], what: object) -> None:
    """Keep `what` alive as long as the autograd graph of one of `values`."""
    for value in values:
        if value.grad_fn is not None:
            notes: Any = value.grad_fn.metadata  # a dict, which torch types as a method
            notes[__name__] = what
