"""An int that raises when it is used: with it capture proves that no block depends on its own position. Used by
chain."""

from __future__ import annotations

import operator
from typing import Any

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift")
_OTHERS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "hash",
    "bool",
    "int",
    "float",
    "complex",
    "index",
    "neg",
    "pos",
    "abs",
    "invert",
    "round",
    "trunc",
    "floor",
    "ceil",
    "str",
    "repr",
    "format",
)


class ReadError(RuntimeError):
    """A Watched number was read."""


class Watched:
    """An int that raises ReadError on every use. It may be passed on, and compared to None by identity."""

    def __init__(self, number: int, message: str) -> None:
        self._number, self._message = number, message

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(x, int) holds
        return int

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        return self


def _raises(name: str) -> Any:
    """The special method `name` of Watched, which raises ReadError."""

    def read(self: Any, *_: Any) -> Any:
        raise ReadError(operator.attrgetter("_message")(self))

    read.__name__ = name
    return read


for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(Watched, f"__{_name}__", _raises(_name))
