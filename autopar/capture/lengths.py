"""`len(tensor)` and `list(tensor)` while a model is traced: its first size, and its rows, as symbolic as they are.

What Python's own `len` gives is an int, and its own `list` has as many tensors, so that a batch whose length a model asks for would be fixed. The names are set in the
files that the model's classes and its loss function are written in, for the time of the trace, as torch.fx's own tracer does; a file with such a name of its own keeps it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def symbolic_lengths(model: nn.Module, *functions: Callable[..., Any]) -> Iterator[None]:
    """Lengths and rows of tensors stay symbolic in the code of `model`, and in the files of `functions`."""
    files = [(names, word) for names in _files(model, functions) for word in WORDS if word not in names]
    try:
        for names, word in files:
            names[word] = WORDS[word]
        with mock.patch.object(torch, "cat", _joining(torch.cat, merged=True)), mock.patch.object(torch, "stack", _joining(torch.stack, merged=False)):
            yield
    finally:
        for names, word in files:
            names.pop(word, None)


def _files(model: nn.Module, functions: tuple[Callable[..., Any], ...]) -> list[dict[str, Any]]:
    """The global names of each file once, torch's own files aside."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    names = dict.fromkeys(str(one.__module__) for one in (*kinds, *functions) if isinstance(getattr(one, "__module__", None), str))
    return [vars(sys.modules[name]) for name in names if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")]


def _length(item: Any) -> Any:
    return item.shape[0] if isinstance(item, Tensor) and item.ndim else len(item)


class Rows:
    """The rows of `whole`, nobody knows how many: they can be put together again, and are no list for anything else (TypeError)."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole


class _Lists(type):
    """Lists are those of Python."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, (builtins.list, Rows))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, builtins.list)


class _List(list, metaclass=_Lists):
    """`list`, but for tensors of symbolic lengths."""

    def __new__(cls, items: Any = ()) -> Any:
        symbolic = isinstance(items, Tensor) and items.ndim > 1 and isinstance(items.shape[0], torch.SymInt)
        return Rows(items) if symbolic else builtins.list(items)


WORDS: dict[str, Any] = {"len": _length, "list": _List}


def _joining(original: Callable[..., Tensor], *, merged: bool) -> Callable[..., Tensor]:
    """torch.cat (`merged`) or torch.stack, also of Rows along their own dim."""
    def join(tensors: Sequence[Tensor] | Rows, *dim: int, **settings: Any) -> Tensor:
        if isinstance(tensors, Rows) and (*dim, *settings.values()) in ((), (0,)):  # `axis` is another name of `dim`
            return tensors.whole.flatten(0, 1) if merged else tensors.whole
        return original(tensors, *dim, **settings)

    return join
