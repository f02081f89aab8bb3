"""Values by tensor while a model runs: by identity (`ByTensor`), or until the tensor's memory is changed
(`UntilChanged`). Used by tape, mask_facts, known_masks and others that follow the values of a run."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from autopar._torch import memory_of

Value = TypeVar("Value")


class ByTensor(Generic[Value]):
    """A value for each of some tensors, by identity. Keeps the tensors alive, because the id of a freed tensor is used
    again."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Value | None]] = {}  # by id

    def get(self, tensor: Tensor) -> Value | None:
        """The value of a tensor; None where it has none."""
        return self._held.get(id(tensor), (tensor, None))[1]

    def keep(self, tensor: Tensor, value: Value) -> None:
        """Give a tensor a value, in place of the one that it has."""
        self._held[id(tensor)] = tensor, value


class UntilChanged(ByTensor[Value]):
    """A value for each of some tensors, until that tensor or another view of its memory is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self._sharing: dict[int, list[Tensor]] = {}  # memory -> the tensors with values that are views of it

    def keep(self, tensor: Tensor, value: Value) -> None:
        """Give a tensor a value, in place of the one that it has."""
        super().keep(tensor, value)
        self._sharing.setdefault(memory_of(tensor), []).append(tensor)

    def forget(self, tensor: Tensor) -> None:
        """Drop the values of a tensor that is changed in place, and of all views of its memory."""
        for one in self._sharing.pop(memory_of(tensor), ()):
            self._held[id(one)] = one, None
