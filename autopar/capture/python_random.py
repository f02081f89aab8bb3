"""Random numbers of Python's and of numpy's own generators: they are drawn while a model is traced, and a graph would
have the same ones in every step. Used by capture.capture and export."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
from torch import nn

from autopar.capture.failures import as_it_is
from autopar.capture.lines import place_of, users


class Draws:
    """The state of both generators at the beginning: true if numbers were drawn since."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)

    def __bool__(self) -> bool:
        now: Any = np.random.get_state(legacy=True)
        return random.getstate() != self._python or any(
            not np.array_equal(a, b) for a, b in zip(now, self._numpy, strict=True)
        )

    def undo(self) -> None:
        """Put both generators back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def draws() -> Iterator[Draws]:
    """A context that says whether numbers are drawn inside, and restores both generators at its end."""
    drawn = Draws()
    try:
        yield drawn
    finally:
        drawn.undo()


def _user(frame: FrameType | None) -> FrameType | None:
    """The nearest frame of the user's, from this one outwards."""
    while frame is not None and not users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def where_drawn(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The user's line that draws first when a model on meta is called and not traced, `at model.py:12: x =
    random.random()`; "" where none does."""
    found: list[str] = []
    with draws() as drawn:
        last = ""

        def line(frame: FrameType, event: str, _: object) -> Any:
            nonlocal last
            if drawn and not found:
                found.append(last)
            last = place_of(_user(frame.f_back) or frame if event == "return" else frame)
            return None if found else line

        def call(frame: FrameType, event: str, _: object) -> Any:
            return line if users(frame.f_code.co_filename) and not found else None

        before = sys.gettrace()
        sys.settrace(call)
        try:
            as_it_is(model, args, kwargs)
        finally:
            sys.settrace(before)
    return next(iter(found), "")
