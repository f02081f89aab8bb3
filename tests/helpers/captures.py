"""`autopar.compile` of one model under several plans, which captures it once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autopar.capture import Captured, capture, precision

_KEPT: dict[Hashable, Captured] = {}


@contextmanager
def captured_once(what: Hashable) -> Iterator[None]:
    """`autopar.compile` inside takes the graph that the first one captured for `what`: one model, its inputs and its dtype."""
    def kept(*args: Any, **kwargs: Any) -> Captured:
        if what not in _KEPT:
            _KEPT[what] = capture(*args, **kwargs)
        return _KEPT[what]

    with mock.patch.object(precision, "capture", kept):
        yield
