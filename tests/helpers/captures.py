"""Captured graphs: captured once for several plans of one model, and what is asked of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autopar.capture import Captured, capture, precision

_KEPT: dict[Hashable, Captured] = {}


@contextmanager
def captured_once(what: Hashable) -> Iterator[None]:
    """`autopar.compile` inside takes the graph that the first one captured for `what`: one model, its inputs and its
    dtype."""

    def kept(*args: Any, **kwargs: Any) -> Captured:
        if what not in _KEPT:
            _KEPT[what] = capture(*args, **kwargs)
        return _KEPT[what]

    with mock.patch.object(precision, "capture", kept):
        yield


def output_names(captured: Captured) -> tuple[str, ...]:
    """Names of the flat outputs, mutations of buffers left out."""
    return tuple(entry["name"] for entry in captured.gm.meta["outputs"] if entry["kind"] != "mutation")
