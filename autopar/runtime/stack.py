"""Dynamically scoped values: a list used as a stack, whose last item is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def pushed(stack: list[T], item: T) -> Iterator[None]:
    """`item` on top of `stack` inside."""
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()
