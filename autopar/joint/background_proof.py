"""The proof of a lower bound while the search runs: a second process looks at claims from the beginning, as all of them
have to be looked at before any bound is above the least work; after the search both processes do (joint.claim_board).
The search asks for first looks, too (`quick_s`), each of which is taken once. Called by joint.fastest.

The second process is forked, so that it has the graph. It computes with numpy and OR-tools only, never with torch,
prints nothing, and ends with this process.
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
"""Seconds between checks whether the second process has finished the claims that it owns."""


class BackgroundProof:
    """A context manager: the proof of a lower bound on all plans of `context`, for as long as the search runs. The
    second process has ended when the context is left."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.prover = Prover(context, closely=False, ends_at=context.timer.ends_at)
        self._process: multiprocessing.process.BaseProcess | None = None

    def __enter__(self) -> BackgroundProof:
        """The second process begins, if a core is free for it and a bound is wanted: not for a named recipe, nor where
        the full proof follows anyway."""
        request = self.context.request
        if not request.prove and request.recipe is None and self.prover.most_looks > 0 and able():
            self._process = self._forked()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def know(self, known_s: float) -> None:
        """Note that there is a plan of `known_s` seconds."""
        self.prover.board.know(min(known_s, self.prover.board.known_s))

    def quick_s(self, shapes: tuple[Shape, ...], known_s: float) -> float:
        """A lower bound in seconds on all plans on `shapes`, which are bounded together, in less time than a glance at
        one of them: what the first look at them proves, whichever process takes it."""
        while (found_s := self.prover.first_look_s(shapes, known_s, OURS)) is None:
            self._wait()
        return found_s

    def _forked(self) -> multiprocessing.process.BaseProcess | None:
        """The second process; None where the system cannot start one."""
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

    def _wait(self) -> None:
        """Give the second process time to finish the claims that it owns, which are free once it has ended."""
        if self._process is None:
            return
        self._process.join(WAIT_S)
        if not self._process.is_alive():
            self.prover.board.leave(THEIRS)

    @property
    def looked(self) -> bool:
        """Whether the bound is higher than the floor, the least work."""
        return self.prover.board.looked

    def proven_s(
        self, known_s: float, mesh: tuple[int, ...] | None, deadline: float, latest: float = -math.inf
    ) -> float:
        """As joint.prove.proven_s, with what the other process has looked at so far. Both look on before the
        `deadline`, and until the `latest` as long as nothing is proven."""
        board = self.prover.board
        board.know(known_s)
        while time.monotonic() < (deadline if self.looked else max(deadline, latest)) and board.open(
            self.prover.enough_s(known_s)
        ):
            if not self.prover.look(known_s, OURS):
                self._wait()
        found_s = self.prover.proven_s(known_s)
        if others := self._others(mesh):
            found_s = min(found_s, proven_s(self.context, known_s, closely=False, deadline=deadline, only=others))
        return found_s

    def _others(self, mesh: tuple[int, ...] | None) -> list[Shape]:
        """The shape of the known plan of one stage, where it is not among those that are always proven."""
        own = [Shape(1, mesh, 1)] if mesh is not None else []
        return [shape for shape in own if shape not in self.prover.shapes()]


def able() -> bool:
    """Whether another process may be forked, and has a core of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return FORKS and sys.platform == "linux" and cores > 1 and not multiprocessing.current_process().daemon


def _look(prover: Prover) -> None:
    """What the second process does: take looks until none can raise the bound, or the first process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that waits for this hears it, and ends this
    gc.freeze()
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive() and prover.look(prover.board.known_s, THEIRS):
        pass
