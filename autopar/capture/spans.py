"""The range of sizes for which a captured graph is valid, where the model has conditions on a size: consecutive sizes,
or multiples of a step. Called by export.

torch proves conditions on sizes (`min(2048, s) <= s`, `s + (64 - s % 64) % 64 == 64 * (...)`) by algebra, or refuses
the dim. Here each condition is evaluated for every size up to a limit. Emitted models refuse larger sizes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from autopar.capture._torch import conditions, narrow
from passes import facts

LARGEST_TRIED_SIZE = 2**17
"""Sizes up to this are tried, or up to four times the user's size if that is larger."""
OTHER_SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 255, 1024)
"""Sizes that are tried for the other symbols of a condition."""
LARGEST_LEAST_SIZE = 2**13
"""Masks are evaluated at the least size of a span: a span whose least size is larger is refused."""


class Fixed(Exception):
    """The program has a size as a constant: another example size would not change that."""


@dataclass(frozen=True)
class Span:
    """`least`, `least + step`, ... `most`."""

    least: int
    most: int
    step: int = 1

    def __contains__(self, size: int) -> bool:
        return self.least <= size <= self.most and size % self.step == 0

    def __str__(self) -> str:
        return f"{self.least} to {self.most}" + (f", multiples of {self.step}" if self.step > 1 else "")


def span(
    program: ExportedProgram, dims: Mapping[int, Mapping[int, str]], name: str, size: int, limit: int | None
) -> Span | None:
    """The longest range of sizes of symbol `name` around `size` for which all conditions of `program` hold, whatever
    the other symbols are; None where it has `size` alone, or a condition cannot be evaluated. Narrows torch's own range
    of the symbol to it.

    `dims` are the names of the dims of each input, `limit` the greatest size that is asked for. Raises Fixed where the
    dim is a number in the program.
    """
    found = conditions(program, dims)
    if found is None or name not in found.names:
        raise Fixed(name)
    sizes = np.arange(2, (limit or max(LARGEST_TRIED_SIZE, 4 * size)) + 1, dtype=np.int64)
    others = [other for other in found.names if other != name]
    for number in OTHER_SIZES if others else OTHER_SIZES[:1]:
        for text in found.texts:
            sizes = _holding(text, name, sizes, dict.fromkeys(others, number))
    around = _around(sizes, size)
    if around is not None:
        narrow(found.names[name], around.least, around.most)
    return around


def unkept(program: ExportedProgram, dims: Mapping[int, Mapping[int, str]]) -> str:
    """A condition on several sizes that `program` assumes and that does not hold for all sizes in their ranges; ""
    where there is none.

    torch compares conditions of one size with what was asked for, and says nothing of those of several (`int(1.5 * b *
    s / 4) == 22`).
    """
    found = conditions(program, dims)
    names = {} if found is None else dict(found.names)
    if found is None or len(names) < 2:
        return ""
    grid = np.meshgrid(*(_tried(size) for size in names.values()))
    first, *others = names
    known = dict(zip(names, (sizes.ravel() for sizes in grid), strict=True))
    several = [text for text in found.texts if len({*_code(text).co_names} & names.keys()) > 1]
    return next(
        (
            text
            for text in several
            if len(_holding(text, first, known[first], {other: known[other] for other in others})) < known[first].size
        ),
        "",
    )


def _tried(size: torch.SymInt) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Some of the sizes that torch takes `size` for."""
    least, most = facts.bounds(size)
    return np.array(
        [
            number
            for number in (least or OTHER_SIZES[0], *OTHER_SIZES)
            if least <= number and (most is None or number <= most)
        ],
        dtype=np.int64,
    )


def _holding(
    text: str, name: str, sizes: np.ndarray[Any, np.dtype[np.int64]], others: Mapping[str, Any]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Those of `sizes` of which the condition `text` is true; none where it cannot be tried. `others` are numbers, or
    arrays of as many."""
    known: dict[str, Any] = {"__builtins__": {}, **WORDS, **others, name: sizes}
    try:
        with np.errstate(all="raise"):
            true = np.asarray(eval(_code(text), known))
        return sizes[np.broadcast_to(true, sizes.shape)] if true.dtype == bool else sizes[:0]
    # conditions in words that numpy does not have
    except (ArithmeticError, AttributeError, NameError, SyntaxError, TypeError, ValueError):
        return sizes[:0]


@lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    """The condition `text` of arrays; it is tried with many sizes of the other dims."""
    return compile(ast.fix_missing_locations(_OfArrays().visit(ast.parse(text, mode="eval"))), text, "eval")


class _OfArrays(ast.NodeTransformer):
    """Python's `and`, `or` and `not` as functions of arrays."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return _call("any_of" if isinstance(node.op, ast.Or) else "all_of", node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("none_of", [node.operand]) if isinstance(node.op, ast.Not) else node


def _call(name: str, values: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), values, [])


def _each(both: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: reduce(both, values)


WORDS: dict[str, Any] = {
    "max": _each(np.maximum), "min": _each(np.minimum), "any_of": _each(np.logical_or), "all_of": _each(np.logical_and),
    "none_of": np.logical_not,
    "math": SimpleNamespace(ceil=np.ceil, floor=np.floor, sqrt=np.sqrt, trunc=np.trunc),
    "torch": SimpleNamespace(sym_float=np.float64), "round": np.round,
}  # fmt: skip
"""The functions in conditions, for arrays."""


def _around(sizes: np.ndarray[Any, np.dtype[np.int64]], size: int) -> Span | None:
    """The longest span of the rising `sizes` around `size`: of neighbours, or else of multiples."""
    found = set(sizes.tolist())
    if size not in found:
        return None
    later, earlier = sizes[sizes > size][:1] - size, size - sizes[sizes < size][-1:]
    for step in dict.fromkeys((1, *later.tolist(), *earlier.tolist())):
        if size % step:
            continue
        least = most = size
        while least - step in found:
            least -= step
        while most + step in found:
            most += step
        if most > least and least <= LARGEST_LEAST_SIZE:
            return Span(least, most, step)
    return None
