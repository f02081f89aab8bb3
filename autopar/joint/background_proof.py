"""A proof beside the search: once there is an answer, another process looks at claims while this one searches on, and
then both do (joint.claim_board).

The other process is forked, so that it has all that was made so far. It computes with numpy and OR-tools alone, never
with torch, says nothing, and ends with this one.
"""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from dataclasses import replace
from types import TracebackType

from autopar.joint.claim_board import FORKS
from autopar.joint.prove import Prover, proven_s
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape

OURS, THEIRS = range(2)
"""Who looks at a claim: this process, or the other one."""

WAIT_S = 0.005
"""So often it is seen whether the other process is done with the claims that are left."""


class BackgroundProof:
    """What no plan for `context` is faster than, looked for in the time of the search. Its other process is gone at the
    end of its context."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.prover = Prover(context, closely=False)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._over = False

    def __enter__(self) -> BackgroundProof:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True  # a frontier searches on
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def know(self, known_s: float) -> None:
        """There is a plan of so many seconds. From the first one on the other process looks, where a core is free for
        it, and anybody asks: not of a recipe that was asked for."""
        if (
            self._over
            or math.isinf(known_s)
            or self.context.request.prove
            or self.context.request.recipe is not None
            or self.prover.most_looks == 0
        ):
            return
        self.prover.board.know(min(known_s, self.prover.board.known_s))
        if self._process is None and able():
            self._process = self._forked()

    def _forked(self) -> multiprocessing.process.BaseProcess | None:
        """The other process; None where the system has no room for one."""
        quiet = copy.copy(self.context)
        quiet.request = replace(self.context.request, progress=None)
        theirs = replace(self.prover, context=quiet)
        theirs.board = self.prover.board
        process = multiprocessing.get_context("fork").Process(target=_look, args=(theirs,), daemon=True)
        with warnings.catch_warnings():
            # of threads, as torch's: the other process needs none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process.start()
            except OSError:
                return None
        return process

    @property
    def looked(self) -> bool:
        """Whether more is proven than the least work there is."""
        return self.prover.board.looked

    def proven_s(self, known_s: float, mesh: tuple[int, ...] | None, deadline: float) -> float:
        """As joint.prove.proven_s, with what the other process has looked at so far; before the `deadline` both look
        on."""
        board = self.prover.board
        board.know(known_s)
        while time.monotonic() < deadline and board.open(self.prover.enough_s(known_s)):
            if self.prover.look(known_s, OURS) or self._process is None:
                continue
            self._process.join(WAIT_S)
            if not self._process.is_alive():
                board.leave(THEIRS)
        found_s = self.prover.proven_s(known_s)
        if others := self._others(mesh):
            found_s = min(found_s, proven_s(self.context, known_s, closely=False, deadline=deadline, only=others))
        return found_s

    def _others(self, mesh: tuple[int, ...] | None) -> list[Shape]:
        """That of a plan of one stage, where it is none that is always searched."""
        own = [Shape(1, mesh, 1)] if mesh is not None else []
        return [shape for shape in own if shape not in self.prover.shapes()]


def able() -> bool:
    """Whether another process may be forked, and has a core of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return FORKS and sys.platform == "linux" and cores > 1 and not multiprocessing.current_process().daemon


def _look(prover: Prover) -> None:
    """The other process: until there is nothing to look at, or nobody to do it for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that waits for this hears it, and ends this
    gc.freeze()
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive() and prover.look(prover.board.known_s, THEIRS):
        pass
