"""Signals that end a command: as an exit, so that its ranks are stopped and its temporary folders removed."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))  # no SIGHUP on Windows
INTERRUPTED = 130
"""The exit code of what Ctrl-C ended, as shells have it."""

IMPORTING = "<frozen importlib._bootstrap"
"""How the files of Python's own frames begin while it imports something."""


@contextlib.contextmanager
def exits() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, with the exit code that shells give, as long as this lasts; one that is
    ignored (nohup) stays so. Where Ctrl-C ends what is inside, that is said and the exit code is INTERRUPTED: results
    are written last, and files at once, so that none is half there."""
    try:
        with _heard():
            yield
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # what typer makes of Ctrl-C
            _interrupted()
        raise


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """A context in which the signals of ENDING raise SystemExit, and Ctrl-C KeyboardInterrupt; signals that are ignored
    or have a handler of the caller are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {**dict.fromkeys(ENDING, (signal.SIG_DFL, _exit)), signal.SIGINT: (signal.default_int_handler, _interrupt)}
    before = {number: signal.getsignal(number) for number in usual}
    for number, (default, ours) in usual.items():
        if before[number] == default:
            signal.signal(number, ours)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """What Python does. But in an import, where C code and fallbacks of libraries take any error for something that is
    missing (torch for numpy's) and go on, the process ends at once."""
    if not _importing(frame):
        raise KeyboardInterrupt
    _interrupted()
    atexit._run_exitfuncs()  # ranks and temporary folders
    os._exit(INTERRUPTED)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(IMPORTING):
        frame = frame.f_back
    return frame is not None


def _interrupted() -> int:
    print("interrupted; no file is half-written", file=sys.stderr, flush=True)
    return INTERRUPTED
