"""Output of the commands: tables on stdout, progress and errors on stderr, files that are whole or not there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autopar.errors import AutoparError, PlanError
from autopar.plan import write_atomic
from autopar.plan_schema import MOST

WIDTH = 140  # of tables in files and pipes


def show(*parts: RenderableType) -> None:
    """Print tables and lines to stdout, as wide as the terminal, or WIDTH where stdout is none."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False)
    with _to_stdout():
        for part in parts:
            console.print(part)


def write_out(text: str) -> None:
    """Write text to stdout as it is. Raises PlanError where that is not possible."""
    with _to_stdout():
        sys.stdout.write(text)


@contextlib.contextmanager
def _to_stdout() -> Iterator[None]:
    """A context at whose end stdout is flushed. Raises PlanError where stdout cannot take the text, as on a full disk;
    where the reader has gone, BrokenPipeError is left to the caller."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # what waits in it would fail once more at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise PlanError(
            f"cannot write to stdout: {error.strerror or error}; send it where there is room, or name a file (-o, "
            "--json)"
        ) from error


def fail(error: Exception) -> None:
    """Print an error as one message on stderr."""
    say(f"error: {error}")


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that shows what is being done and for how long, on terminals only; it vanishes at the end. Gives
    the function that sets the text."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda text: bar.update(task, description=f"{title}: {text}")


def writable(
    option: str,
    where: str | Path | None,
    what: str = "the result",
    *,
    folders: bool = True,
    stdout: bool = True,
    error: type[AutoparError] = PlanError,
) -> str | Path | None:
    """Returns `where`, after a check that `what` can be written there. Raises `error` where it cannot, before any work
    is done for it. `folders`: missing folders above the file will be made. `stdout`: - is allowed and means stdout."""
    if where is None or (stdout and str(where) == "-"):
        return where
    why = (
        "it would go to stdout, where the tables go"
        if str(where) == "-"
        else _unwritable(Path(where).absolute(), folders)
    )
    if why:
        raise error(f"cannot write {what} to {where}: {why}; {option} wants the name of a file that can be written")
    return where


def of_size(value: int | None) -> int | None:
    """A size of inputs, after a check that a plan file may say it. Raises PlanError."""
    if value is not None and value > MOST:
        raise PlanError(f"a batch or sequence of {value}; wanted at most {MOST}")
    return value


def _unwritable(path: Path, folders: bool) -> str:
    """Why no file can be written at `path`; empty where one can."""
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():  # a device or a pipe: it is written to, and its folder is not
        return "" if os.access(path, os.W_OK) else "it cannot be written to"
    if not folders and not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    folder = next(above for above in path.parents if above.exists())
    if folder.is_dir() and os.access(folder, os.W_OK):
        return ""
    return f"{folder} {'' if folder.is_dir() else 'is no folder and '}cannot be written to"


def write_json(where: str | None, data: Any) -> bool:
    """Write `data` to the file `where`, atomically, or to stdout for "-". Returns whether it was written to stdout, so
    that nothing else may be.

    Infinite numbers, which JSON lacks, become null.
    """
    if where is None:
        return False
    text = json.dumps(_finite(data), indent=1) + "\n"
    if where == "-":
        write_out(text)
        return True
    write_atomic(Path(where), text)
    return False


def _finite(value: Any) -> Any:
    """`value` with infinite numbers as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
