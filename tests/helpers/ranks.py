"""Running tests on local gloo ranks: on new ones, or on living ones that many tests share."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import autopar.runtime.algorithms
import autopar.runtime.pipeline  # noqa: F401  what emitted files import: once here, not again on every rank
from autopar.runtime import failures
from autopar.runtime.launch import Ranks, launch


def on_ranks(nprocs: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(*args)` on `nprocs` living ranks; its results in rank order. An assertion that fails on a rank fails the
    test with its traceback. `body` stands at the top of its module."""
    return living(nprocs).run(body, *args)


def on_new_ranks(nprocs: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """The same on ranks of its own: for what is to fail there, for compilers that remember, and for bodies made inside
    a test."""
    return launch(body, nprocs, *args, timeout_s=timeout_s)


def _and_whether_torn(body: Callable[..., Any], *args: Any) -> tuple[Any, bool]:
    """The result of a job on a rank, and whether steps were given up in it."""
    return body(*args), failures.torn()


class Resting(Ranks):
    """Ranks that are stopped between jobs. Gloo's threads, some for every group that a rank ever had, wake a hundred
    times in a second: without this, ranks that wait for their next job take a tenth of a processor."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """As `Ranks.run`. Ranks on which no further step begins, as one gave up waiting for others, are stopped."""
        self._send(signal.SIGCONT)
        try:
            results, torn = zip(*super().run(_and_whether_torn, fn, *args), strict=True)
            if any(torn):
                self.stop()
            return list(results)
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for child in self._team.children if self._team is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)


@cache
def living(nprocs: int) -> Ranks:
    """Ranks that live until this process ends; a job that fails has them replaced."""
    ranks = Resting(nprocs, timeout_s=120.0)
    atexit.register(ranks.stop)
    return ranks
