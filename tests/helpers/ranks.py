"""Running tests on local gloo ranks: on new ones, or on living ones that many tests share."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

from autopar.runtime.launch import Ranks, launch


def on_ranks(nprocs: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(*args)` on `nprocs` living ranks; its results in rank order. An assertion that fails on a rank fails the test with its
    traceback. `body` stands at the top of its module."""
    return living(nprocs).run(body, *args)


def on_new_ranks(nprocs: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """The same on ranks of its own: for what is to fail there, for compilers that remember, and for bodies made inside a test."""
    return launch(body, nprocs, *args, timeout_s=timeout_s)


@cache
def living(nprocs: int) -> Ranks:
    """Ranks that live until this process ends; a job that fails has them replaced."""
    ranks = Ranks(nprocs, timeout_s=120.0)
    atexit.register(ranks.stop)
    return ranks
