"""What is known of tensors while a model runs, as long as their values stay."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from autopar._torch import memory_of

Value = TypeVar("Value")


class ByTensor(Generic[Value]):
    """A value for each tensor, until it, or another view of its memory, is changed in place."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._sharing: dict[int, list[int]] = {}  # memory -> ids of the tensors that are views of it
        self._alive: list[Tensor] = []  # keeps ids valid: the id of a freed tensor would be reused

    def get(self, tensor: Tensor) -> Value | None:
        """The value of a tensor; None where it has none."""
        return self._values.get(id(tensor))

    def keep(self, tensor: Tensor, value: Value) -> None:
        """Give a tensor a value."""
        self._alive.append(tensor)
        self._sharing.setdefault(memory_of(tensor), []).append(id(tensor))
        self._values[id(tensor)] = value

    def forget(self, tensor: Tensor) -> None:
        """Drop the values of a tensor that is changed in place, and of all views of its memory."""
        for one in self._sharing.pop(memory_of(tensor), ()):
            self._values.pop(one, None)
