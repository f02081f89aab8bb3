"""Running a test's body on local gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.runtime.launch import launch


def on_ranks(nprocs: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`body(*args)` on `nprocs` ranks; its results in rank order. An assertion that fails on a rank fails the test with its traceback."""
    return launch(body, nprocs, *args, timeout_s=timeout_s)
