"""`len(tensor)`, `list(tensor)`, `int(size)` and `float(size)` while a model is traced: sizes and rows, as symbolic as
they are; and `set(names)`, in order. Used by export.

Python's `len` and `int` return an int, and `list` a fixed number of tensors, so a model that uses them would fix its
batch size. The order of a set of strings differs from process to process, so a model that goes through one (a table of
rotations for each kind of layer) would have another graph on each rank. While tracing, these names are replaced in the
modules (files) of the model's classes and of its loss function, as torch.fx's tracer does. A file that defines such a
name keeps its own, and so does one that uses `int` or `float` as a value (`dtype=float`, `type(x) is int`), where torch
and Python accept only the real ones.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def symbolic_lengths(model: nn.Module, *functions: Callable[..., Any]) -> Iterator[None]:
    """Lengths and rows of tensors stay symbolic in the code of `model`, and in the files of `functions`."""
    files = [
        (vars(file), word)
        for file in _files(model, functions)
        for word in WORDS
        if word not in vars(file) and word not in _handed_on(file)
    ]
    try:
        for names, word in files:
            names[word] = WORDS[word]
        with (
            mock.patch.object(torch, "cat", _joining(torch.cat, merged=True)),
            mock.patch.object(torch, "stack", _joining(torch.stack, merged=False)),
        ):
            yield
    finally:
        for names, word in files:
            names.pop(word, None)


def _files(model: nn.Module, functions: tuple[Callable[..., Any], ...]) -> list[ModuleType]:
    """Each file once, torch's own aside."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    names = dict.fromkeys(
        str(one.__module__) for one in (*kinds, *functions) if isinstance(getattr(one, "__module__", None), str)
    )
    return [
        sys.modules[name]
        for name in names
        if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")
    ]


@cache
def _handed_on(file: ModuleType) -> frozenset[str]:
    """Those of NUMBERS that `file` uses in another way than to call them, to ask with isinstance, to map them or to
    annotate; all where it has no text."""
    try:
        tree = ast.parse(inspect.getsource(file))
    except (OSError, TypeError, SyntaxError):
        return frozenset(NUMBERS)
    nodes, plain = [*ast.walk(tree)], set[ast.AST]()
    for node in nodes:
        if isinstance(node, ast.Call):
            asks = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass", "map")
            plain.update([node.func], *(ast.walk(argument) for argument in node.args if asks))
        notes = [getattr(node, field, None) for field in ("annotation", "returns")]
        plain.update(*(ast.walk(note) for note in notes if isinstance(note, ast.AST)))
    return frozenset(
        node.id for node in nodes if isinstance(node, ast.Name) and node.id in NUMBERS and node not in plain
    )


def _length(item: Any) -> Any:
    return item.shape[0] if isinstance(item, Tensor) and item.ndim else len(item)


class Rows:
    """`list(whole)` for a tensor of symbolic length: it can be stacked or concatenated again; any other use raises
    TypeError."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole


class _Also(type):
    """What stands for a class `OWN` of Python: its instances are those of that class, and of `BESIDE`."""

    OWN: type
    BESIDE: type

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, (cls.OWN, cls.BESIDE))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.OWN)


class _List(list, metaclass=_Also):
    """`list`; of a tensor of symbolic length Rows."""

    OWN, BESIDE = builtins.list, Rows

    def __new__(cls, items: Any = ()) -> Any:
        symbolic = isinstance(items, Tensor) and items.ndim > 1 and isinstance(items.shape[0], torch.SymInt)
        return Rows(items) if symbolic else builtins.list(items)


def _of_sizes(arguments: tuple[Any, ...]) -> bool:
    """Whether the argument of `int` or `float` is a symbolic size, or computed from such."""
    return len(arguments) == 1 and isinstance(arguments[0], (torch.SymInt, torch.SymFloat))


class _Int(int, metaclass=_Also):
    """`int`; sizes stay symbolic, and numbers computed from them are rounded towards zero symbolically."""

    OWN, BESIDE = builtins.int, torch.SymInt

    def __new__(cls, *number: Any, **settings: Any) -> Any:
        if not _of_sizes(number):
            return builtins.int(*number, **settings)
        # torch.sym_int rounds by a function that emitted sizes do not have
        return math.floor(*number) if number[0] >= 0 else math.ceil(*number)


class _Float(float, metaclass=_Also):
    """`float`; sizes stay symbolic."""

    OWN, BESIDE = builtins.float, torch.SymFloat

    def __new__(cls, *number: Any) -> Any:
        return torch.sym_float(*number) if _of_sizes(number) else builtins.float(*number)


class _Set(set, metaclass=_Also):
    """`set`; strings come in order."""

    OWN = BESIDE = builtins.set

    def __iter__(self) -> Iterator[Any]:
        each = builtins.list(super().__iter__())
        return iter(sorted(each) if all(isinstance(one, str) for one in each) else each)


def _making(name: str) -> Callable[..., Any]:
    """The method of sets that is called `name`, whose result is a set in order, too."""
    method = getattr(builtins.set, name)

    def make(*sets: Any) -> Any:
        made = method(*sets)
        return made if made is NotImplemented else _Set(made)

    return make


for _name in ("__and__", "__or__", "__sub__", "__xor__", "copy", "difference", "intersection", "union"):
    setattr(_Set, _name, _making(_name))


NUMBERS: dict[str, Any] = {"int": _Int, "float": _Float}
WORDS: dict[str, Any] = {"len": _length, "list": _List, "set": _Set, **NUMBERS}


def _joining(original: Callable[..., Tensor], *, merged: bool) -> Callable[..., Tensor]:
    """torch.cat (`merged`) or torch.stack, also of Rows along their own dim."""

    def join(tensors: Sequence[Tensor] | Rows, *dim: int, **settings: Any) -> Tensor:
        if isinstance(tensors, Rows) and (*dim, *settings.values()) in ((), (0,)):  # `axis` is another name of `dim`
            return tensors.whole.flatten(0, 1) if merged else tensors.whole
        return original(tensors, *dim, **settings)

    return join
