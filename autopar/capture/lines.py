"""The user's source lines: the one that is running, and the one that an error comes from. Used in messages."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch import nn

from autopar.capture._torch import export_errors, sizes_fixed
from autopar.capture.shadow import WithLoss

_FIXED = re.compile(r"specialized it to be a constant \((\d+)\)")
LIBRARY = str(Path(inspect.__file__).parent) + "/"


def source(error: BaseException | None, model: nn.Module) -> str:
    """The last frame outside torch: the user's own line. Code that was made of text (`<string>`) has none to show."""
    frames = [f for f in traceback.extract_tb(error.__traceback__ if error else None) if users(f.filename) and f.line]
    if frames:
        return f"at {_short(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    found = re.search(r'File "([^"]+)", line (\d+)[^\n]*\n\s*(.+)', text)
    return f"at {_short(found.group(1))}:{found.group(2)}: {found.group(3)}" if found else f"in {_within(model)}"


def _within(model: nn.Module) -> str:
    """The user's class, and the loss function where one was added."""
    inner = getattr(model, WithLoss.INNER, None)
    return type(model).__name__ if inner is None else f"{type(inner).__name__} or in loss_fn"


def place_of(frame: FrameType) -> str:
    """The line that runs in a frame, as `source` says it."""
    path = frame.f_code.co_filename
    return f"at {_short(path)}:{frame.f_lineno}: {linecache.getline(path, frame.f_lineno).strip()}"


def caller() -> str:
    """The user's line that is running, `model.py:12`."""
    frames = [f for f in traceback.extract_stack() if users(f.filename)]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else "called by torch"


@contextmanager
def noting_fixed_sizes() -> Iterator[None]:
    """A context whose errors of torch about sizes that became numbers have a note with the user's line that made
    them."""
    lines: dict[int, str] = {}

    def note(number: int) -> None:
        if number not in lines and (frames := [f for f in traceback.extract_stack() if users(f.filename)]):
            lines[number] = "".join(traceback.format_list(frames[-1:]))

    try:
        with sizes_fixed(note):
            yield
    except export_errors() as error:
        for number in map(int, _FIXED.findall(str(error))):
            if number in lines:
                error.add_note(lines[number])
        raise


def users(path: str) -> bool:
    """Whether a file belongs to the user: not to torch, autopar, or Python's standard library (which has names such as
    `<frozen abc>` too)."""
    return (
        not path.startswith("<frozen ")
        and "/torch/" not in path
        and "/autopar/" not in path
        and ("/site-packages/" in path or not path.startswith(LIBRARY))
    )


def _short(path: str) -> str:
    """The name of a file without its folders."""
    return path.rsplit("/", 1)[-1]
