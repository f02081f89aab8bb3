"""Temporary folders that do not pile up: making one removes those of processes that were killed.

The process that makes a folder holds a lock on a file in it, and so do ranks that are forked from it; the system
releases the lock when the last of them ends, however that happens. A folder whose lock is free is left over. One
without that file is just being made, or is not ours, and stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType

if sys.platform != "win32":
    import fcntl

PREFIX = "autopar-"
HELD = "held.lock"


class Scratch:
    """A temporary folder, `name`, that is there until `cleanup`, or the end of a `with`; an ordinary end of the process
    removes it too."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.name = self._folder.name
        self._lock = _hold(Path(self.name))

    def cleanup(self) -> None:
        """Remove it with all that is in it."""
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


def _hold(folder: Path) -> int | None:
    """Take the lock of a new folder; gives its file descriptor. The file is renamed to HELD only once it is locked."""
    if sys.platform == "win32":
        return None
    made = os.open(folder / f"{HELD}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(made, fcntl.LOCK_EX)
    os.rename(folder / f"{HELD}.new", folder / HELD)
    return made


def _sweep(where: Path) -> None:
    """Remove this user's folders in `where` whose lock nobody holds."""
    if sys.platform == "win32":
        return
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, of somebody else, no folder, without a lock, or held
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
