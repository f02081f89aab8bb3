"""Argument checks on values, `if condition: raise ...`, while a model runs without values: they are taken to pass. Used
by export and valueless.

    # or elif, `not`, and, or; the other side of an else; an assert
    if labels.max() >= vocab_size: raise ValueError(...)

A graph has no such branch. One side only raises, so for every batch that the model accepts it computes the other side;
the notes list the checks that are left out. A check whose error the model itself may catch decides what is computed,
and is not left out. Conditions on finite values are answered too (`capture.finite_checks`), whatever depends on them.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from unittest import mock

from torch import Tensor

from autopar.capture.finite_checks import Finite
from autopar.capture.lines import place_of, users

UNCHECKED = (
    "a check of values is no part of the emitted program: batches that it refuses are computed, check them before"
)
UNCLAMPED = "values are taken to be finite: what the model does where they are not is no part of the emitted program"

Span = tuple[int, int, int, int]
"""First line and column, and last line and column, of an expression."""


@contextmanager
def passing_guards(told: list[str] | None = None) -> Iterator[None]:
    """A context in which checks on tensor values pass, and values are taken to be finite; each such question is added
    to `told` as a note, once."""
    asked, finite = Tensor.__bool__, Finite()
    notes: list[str] = [] if told is None else told

    def answered(tensor: Tensor) -> bool:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None, "something asks"
        answer, note = _passes(frame.f_back), UNCHECKED
        if answer is None:
            answer, note = finite.of(tensor), UNCLAMPED
        if answer is None:
            return asked(tensor)
        note = f"{note} ({place_of(frame.f_back)})"
        if note not in notes:
            notes.append(note)
        return answer

    answered.__name__ = asked.__name__  # by which modes know it
    with mock.patch.object(Tensor, "__bool__", answered), finite:
        yield


def _passes(frame: FrameType) -> bool | None:
    """The answer that lets a check pass, where the truth of a tensor is asked for in `frame`; None where that is no
    check."""
    positions = inspect.getframeinfo(frame, context=0).positions
    if positions is None or None in positions or _is_ours(frame) or _is_caught(frame):
        return None
    span: Span = (positions.lineno, positions.col_offset, positions.end_lineno, positions.end_col_offset)  # type: ignore[assignment]  # none is None
    return _checks(frame.f_code.co_filename).get(span)


def _is_ours(frame: FrameType) -> bool:
    """Whether the code that asks for a value is no part of a model."""
    return str(frame.f_globals.get("__name__")).startswith(("autopar.", "passes."))


def _is_caught(frame: FrameType | None) -> bool:
    """Whether the model itself catches errors raised in `frame` (the tracer catches some too, which do not count)."""
    while frame is not None and not _is_ours(frame):
        if users(frame.f_code.co_filename) and any(
            first <= frame.f_lineno <= last for first, last in _catching(frame.f_code.co_filename)
        ):
            return True
        frame = frame.f_back
    return False


@cache
def _parsed(path: str) -> ast.Module:
    """The syntax tree of a file; an empty one where it is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return ast.Module([], [])


@cache
def _catching(path: str) -> list[tuple[int, int]]:
    """First and last lines of the `try` bodies in a file whose errors some handler does not raise again."""
    tries = [
        node
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Try) and not all(_raises(handler.body) for handler in node.handlers)
    ]
    return [(node.body[0].lineno, node.body[-1].end_lineno or 0) for node in tries]


@cache
def _checks(path: str) -> dict[Span, bool]:
    """Every condition of a check in a file -> the truth value that lets the check pass."""
    found: dict[Span, bool] = {}
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.If) and _raises(node.body) != _raises(node.orelse):
            _check(node, node.test, _raises(node.orelse), found)
        elif isinstance(node, ast.Assert):
            _check(node, node.test, True, found)
    return found


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a branch ends in an error, whatever it does before."""
    return bool(body) and isinstance(body[-1], ast.Raise)


def _check(statement: ast.stmt, test: ast.expr, wanted: bool, found: dict[Span, bool]) -> None:
    """Record in `found` the answer that each condition of a check needs. Python reports the position of the condition
    that asks, or only that of the statement, which is enough if all conditions need the same answer."""
    conditions = _conditions(test, wanted)
    if any(isinstance(condition, ast.IfExp) for condition, _ in conditions):
        return  # `a if b else c`: it is not known which of them is asked
    found.update({_span(condition): value for condition, value in conditions})
    if len({value for _, value in conditions}) == 1:
        found[_span(statement)] = conditions[0][1]


def _conditions(test: ast.expr, wanted: bool) -> list[tuple[ast.expr, bool]]:
    """The conditions that `test` is made of, each with what makes it `wanted`: where one is enough, all are."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _conditions(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        return [pair for condition in test.values for pair in _conditions(condition, wanted)]
    return [(test, wanted)]


def _span(node: ast.stmt | ast.expr) -> Span:
    """The position of a node, as tracebacks give it."""
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
